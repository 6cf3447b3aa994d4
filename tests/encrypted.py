"""Models trained and predicted under encryption by small keys, for tests of Fed-EINI."""

from fedapp.run_folder import RunFolder
from fedapp.settings import Settings
from tests.strategies.test_interactive import inference

Trained = tuple[Settings, RunFolder]
KINDS_OF_MODELS = ("secureboost", "federated-forest")
SMALL = {"key_bits": 512, "insecure_small_key": True}


def encrypted(settings, trained, **more):
    """Settings of an encrypted prediction of the rows the model was trained on."""
    given = {f"eini__{name}": value for name, value in {**SMALL, "unguarded": True}.items()}
    plain = {"align": "ordered", "columns": trained.columns, **given, **more}
    return inference(settings, trained, **plain).model_copy(update={"strategy": "eini"})
