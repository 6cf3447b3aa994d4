"""A fedapp that is not the one that is installed."""

import shutil

from fedapp.home import app_folder

# The site's own table, as the text of an error.
ANSWER = "reply = answered(config, kind, envelope, content, self.stores)"
TABLE = "raise FedappError(open(config.data).read())"


def edited_app(folder, changed):
    """A copy of the installed app.

    Parameters
    ----------
    changed : ``an answer``: it answers every message with the site's rows; or a version.
    """
    folder.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(app_folder() / name, folder)
    for name in ("fedapp", "strategies", "clients", "simulations"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(app_folder() / name, folder / name, ignore=ignored)
    if changed == "an answer":
        _replace(folder / "fedapp" / "client_app.py", ANSWER, TABLE)
    else:
        number = changed.removeprefix("version ")
        _replace(folder / "pyproject.toml", 'version = "0.2.0"', f'version = "{number}"')
    return folder


def _replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
