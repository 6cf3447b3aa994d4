"""The registry: public data sets with their files, checksums, columns and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.schema import PACKINGS, PLAIN, Reader


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a data set."""

    name: str  # with .gz or .bz2 if it is stored packed
    stored_sha256: str
    content_sha256: str = ""  # of the unpacked content; empty if the file is not packed
    url: str = ""  # of the content, packed or not; empty if it is not public

    @property
    def names(self) -> tuple[str, ...]:
        """All names the file may have."""
        bare = bare_name(self.name)
        return tuple(dict.fromkeys((self.name, bare, *(bare + packing for packing in PACKINGS))))


@dataclass(frozen=True, slots=True)
class DataSet:
    """A table known by name."""

    task: str  # "binary", "multiclass" or "regression"
    shape: tuple[int, int]  # rows and features of the loaded table
    description: str  # what a row is, and how the columns were changed
    source: str  # publisher and licence
    files: tuple[DataFile, ...] = ()  # the first is the table; empty for scikit-learn's sets
    label: str = "label"
    drop: tuple[str, ...] = ()  # columns that are not features
    reader: Reader = PLAIN
    prepare: Callable[[Any], Any] | None = None  # from the file's pyarrow.Table to the table's


def bare_name(name: str) -> str:
    """A file's name without its packing."""
    return name.removesuffix(".gz").removesuffix(".bz2")


def _airline(frame: Any) -> Any:
    """Keep flights that arrived, and add the label."""
    frame = frame.filter(pc.is_valid(frame["ArrDelay"]))
    minutes = frame["ArrDelay"].cast(pa.int64())
    return frame.append_column("delayed", pc.greater(minutes, 15).cast(pa.float64()))


def _github(repository: str, commit: str, path: str) -> str:
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"


def _file(
    name: str, stored_sha256: str, content_sha256: str = "", url: str = ""
) -> tuple[DataFile]:
    return (DataFile(name, stored_sha256, content_sha256, url),)


BUILT_IN = {
    "breast-cancer": DataSet(
        "binary", (569, 30), "tumours; 0 malignant, 1 benign", "scikit-learn", label="target"
    ),
    "digits": DataSet(
        "multiclass", (1797, 64), "handwritten digits, 8 x 8 pixels", "scikit-learn", label="target"
    ),
    "diabetes": DataSet(
        "regression", (442, 10), "progress of diabetes after a year", "scikit-learn", label="target"
    ),
    "wine": DataSet(
        "multiclass", (178, 13), "wines of three growers", "scikit-learn", label="target"
    ),
}

_LIBSVM_SITE = "LIBSVM data page, after UCI"

_ADULT_COLUMNS = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    "capital-gain capital-loss hours-per-week native-country income"
)
_KDD_COLUMNS = (
    "duration protocol_type service flag src_bytes dst_bytes land wrong_fragment urgent hot "
    "num_failed_logins logged_in num_compromised root_shell su_attempted num_root "
    "num_file_creations num_shells num_access_files num_outbound_cmds is_host_login "
    "is_guest_login count srv_count serror_rate srv_serror_rate rerror_rate srv_rerror_rate "
    "same_srv_rate diff_srv_rate srv_diff_host_rate dst_host_count dst_host_srv_count "
    "dst_host_same_srv_rate dst_host_diff_srv_rate dst_host_same_src_port_rate "
    "dst_host_srv_diff_host_rate dst_host_serror_rate dst_host_srv_serror_rate "
    "dst_host_rerror_rate dst_host_srv_rerror_rate label"
)
_SPAM_WORDS = (
    "make address all 3d our over remove internet order mail receive will people report addresses "
    "free business email you credit your font 000 money hp hpl george 650 lab labs telnet 857 data "
    "415 85 technology 1999 parts pm direct cs meeting original project re edu table conference"
)
_SPAM_COLUMNS = (
    *(f"word_freq_{word}" for word in _SPAM_WORDS.split()),
    *(f"char_freq_{char}" for char in ";([!$#"),
    *(f"capital_run_length_{part}" for part in ("average", "longest", "total")),
    "spam",
)
_AIRLINE_AT_ARRIVAL = (
    "ArrTime ActualElapsedTime AirTime ArrDelay TaxiIn CarrierDelay WeatherDelay NASDelay "
    "SecurityDelay LateAircraftDelay"
)
_AIRLINE_NO_USE = "Year Month TailNum Cancelled CancellationCode Diverted"

REGISTRY = {
    "default-credit": DataSet(
        "binary",
        (30000, 23),
        "credit card holders; 1 is default next month; without ID",
        "UCI; copy in FederatedAI/FATE (Apache-2.0)",
        _file(
            "default-credit.csv.gz",
            "3b1c8e69fc71fb19229d8d3dedeeaf70012b7706bee03b534a33a6ba32a78394",
            "a0f0ab49d6326671d6cd83be5c88dcf18007025fe9a53ecd699119c871176ca1",
            _github("FederatedAI/FATE", "5a06d9e4", "examples/data/UCI_Credit_Card.csv"),
        ),
        "default.payment.next.month",
        ("ID",),
    ),
    "give-me-some-credit": DataSet(
        "binary",
        (150000, 10),
        "borrowers; 1 is 90 days past due within two years; without the row number",
        "Kaggle, cs-training.csv; copy in h2oai/h2o-2 (Apache-2.0)",
        _file(
            "give-me-some-credit.csv.gz",
            "bf9d7dc4f7f524002fa900b11c921ca6f931bfc2863a42c94f0d70a6a4b865c2",
            "1bd46da486a5708c58c7b01a034fae2a13b327f6f7b62ea7ba4fe3b5824b24ac",
            _github("h2oai/h2o-2", "be350f3f", "smalldata/kaggle/creditsample-training.csv.gz"),
        ),
        "SeriousDlqin2yrs",
        ("unnamed-1",),
    ),
    "a9a": DataSet(
        "binary",
        (32561, 123),
        "census rows as 0/1 columns; 1 is an income above 50K, -1 below",
        _LIBSVM_SITE + "; copy in dtera/fl_xgboost (Apache-2.0)",
        _file(
            "a9a.libsvm.gz",
            "8930931143e8ecd54a1dac81e65d7651cbd4f4840e2e9536ae18ee03d135d28c",
            "7ba53cccb27e2e525f0fb173e1f446d49856e3fb007eb43be4ec6d0f5b3335ca",
            _github("dtera/fl_xgboost", "0abd2e16", "data/a9a"),
        ),
        reader=Reader(n_features=123),
    ),
    "a9a-test": DataSet(
        "binary",
        (16281, 123),
        "test rows of a9a",
        _LIBSVM_SITE + "; copy in dtera/fl_xgboost (Apache-2.0)",
        _file(
            "a9a-test.libsvm.gz",
            "92967561181c73a60149cc8221b936eb746573fda8cbf483115d673f42b26c3f",
            "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
            _github("dtera/fl_xgboost", "0abd2e16", "data/a9a.t"),
        ),
        reader=Reader(n_features=123),
    ),
    "cod-rna": DataSet(
        "binary",
        (59535, 8),
        "pairs of RNA sequences; 1 is non-coding RNA, -1 is not",
        "LIBSVM data page; copy in Arkhymadhe/COD-rNA (no licence file)",
        _file(
            "cod-rna.libsvm.gz",
            "27867970f79e7200c161c9c1d7489b560afc18674e5553eb1342e9e252358123",
            "65b7cc0689fc29bba5db8b50fab0b6446d985f4bf8f6f5dd474f7df8b2f1ab6c",
        ),
        reader=Reader(n_features=8),
    ),
    "cod-rna-test": DataSet(
        "binary",
        (271617, 8),
        "test rows of cod-rna",
        "LIBSVM data page; copy in Arkhymadhe/COD-rNA (no licence file)",
        _file(
            "cod-rna-test.libsvm.gz",
            "90fe5ea9f04a8cf91a0c3315b03e7d21225acfec7b55f620d2991aa55abf66e5",
            "58cff16df896436b06343df78ccaef37a6979d819abbcadbec3cb16b93938df6",
        ),
        reader=Reader(n_features=8),
    ),
    "ijcnn1": DataSet(
        "binary",
        (49990, 22),
        "engine misfires (IJCNN 2001 contest); 1 or -1; training and validation rows",
        "LIBSVM data page; copy in X-DataInitiative/tick-datasets (BSD-3-Clause)",
        _file(
            "ijcnn1.libsvm.gz",
            "47cab08392bd06c78955eaf699078be7de27577ce9856cc261df813638330ec3",
            "7fe291672c3fefe6a7e3c51529becd23f0e985ba05ffb8d53c9c648c1e91cc19",
            _github("X-DataInitiative/tick-datasets", "9d959b6e", "binary/ijcnn1/ijcnn1.trn.bz2"),
        ),
        reader=Reader(n_features=22),
    ),
    "ijcnn1-test": DataSet(
        "binary",
        (91701, 22),
        "test rows of ijcnn1",
        "LIBSVM data page; copy in X-DataInitiative/tick-datasets (BSD-3-Clause)",
        _file(
            "ijcnn1-test.libsvm.gz",
            "46975aadc0337200b2926e3e2e9cb7586177049e0597a541083e294da0e7a1f2",
            "e7b0bbd518641980dc322746c6bc59d019d3153934e6258e48f9d8cfae2c4bb8",
            _github("X-DataInitiative/tick-datasets", "9d959b6e", "binary/ijcnn1/ijcnn1.tst.bz2"),
        ),
        reader=Reader(n_features=22),
    ),
    "higgs-11k": DataSet(
        "binary",
        (10984, 28),
        "collisions; 1 is a Higgs boson; a sample of the 11,000,000 rows",
        "UCI; copy in sassoftware/sas-viya-workbench-examples (Apache-2.0)",
        _file(
            "higgs-11k.csv.gz",
            "17f6413f944cf26254a01bcf5d99c6c5f34780ba20cd69e3dbf18e96af7e49ed",
            "21f8b95e4aaed9e631a76d69c724bb0ca94456bc1ac01e18fd81b968dd3c9724",
            _github("sassoftware/sas-viya-workbench-examples", "f180274b", "data/higgs.csv"),
        ),
    ),
    "abalone": DataSet(
        "regression",
        (4177, 8),
        "abalones; rings, 1 to 29; columns scaled to [-1, 1], f1 is the sex",
        _LIBSVM_SITE + "; copy in X-DataInitiative/tick-datasets (BSD-3-Clause)",
        _file(
            "abalone.libsvm",
            "7f1f6ca7f636e684949fc3f6388fc4f7503083717f776876bbdd11098fc5378b",
            url=_github(
                "X-DataInitiative/tick-datasets", "9d959b6e", "regression/abalone/abalone.trn.bz2"
            ),
        ),
        reader=Reader(n_features=8),
    ),
    "space-ga": DataSet(
        "regression",
        (3107, 6),
        "counties of the USA; logarithm of the share of votes cast in 1980",
        "StatLib; copy in renatopp/arff-datasets (no licence file)",
        _file(
            "space-ga.arff",
            "60214403592cc46bcd24055838bdd612ea3e9865c0dda2af371f1ab46bcfb263",
            url=_github(
                "renatopp/arff-datasets",
                "c59f172882592bb58982cc54d2d3c8a2b57e9b73",
                "statlib/numeric/space_ga.arff",
            ),
        ),
        "ln(VOTES/POP)",
        # ARFF: line 50 is @data.
        reader=Reader(
            "csv",
            skip_lines=50,
            columns=("ln(VOTES/POP)", "POP", "EDUCATION", "HOUSES", "INCOME", "XCOORD", "YCOORD"),
        ),
    ),
    "ionosphere": DataSet(
        "binary",
        (351, 34),
        "radar returns; g is good, b is bad; column 2 is always 0",
        "UCI; copy in dhankasushil/Database-for-SE (no licence file)",
        _file(
            "ionosphere.csv",
            "d8044e1d5a28e608456241607dbbd747616989be9a68416d0bf6ebc066aa4bba",
            url=_github("dhankasushil/Database-for-SE", "fe8cf7e5", "ionosphere.data"),
        ),
        "class",
    ),
    "spambase": DataSet(
        "binary",
        (4601, 57),
        "e-mails; 1 is spam",
        "UCI; copy in Joshd1013/csv (no licence file)",
        _file(
            "spambase.csv",
            "28da4fbefed1c8fb8467e004d12f975b17d2ce8d576f9efba22e18ea3192b826",
            url=_github(
                "Joshd1013/csv", "abf39b8bb261c740e37a4a69560c3e5ec49e3901", "spambase.data"
            ),
        ),
        "spam",
        reader=Reader(skip_lines=1, columns=_SPAM_COLUMNS),
    ),
    "waveform": DataSet(
        "multiclass",
        (5000, 21),
        "mixtures of two of three waves, with noise (version 1)",
        "UCI; copy in dhankasushil/Database-for-SE (no licence file)",
        _file(
            "waveform.csv",
            "8b6221141343353c1d4bf45d0d8d43cb910e9cee2cb71c346fd30fcdc239578f",
            url=_github("dhankasushil/Database-for-SE", "fe8cf7e5", "waveform.data"),
        ),
        "class",
    ),
    "kddcup99": DataSet(
        "multiclass",
        (494021, 41),
        "network connections, the 10 percent set; 23 classes that end in a dot; 70.5% of the rows "
        "repeat another one; text columns are categories",
        "UCI; copy in potash/brf-example (no licence file)",
        _file(
            "kddcup99-10pct.csv.gz",
            "7bfaa8cef1350f72842018c32893e2fa4539d57efbb22f998eb74ecefc3da3b4",
            "f8c8267ebcd9c0ed1fd7d6277fe5bfff8732e9b7db8e61b873542b2a534b6f9a",
            _github("potash/brf-example", "cb1486bb", "data/kddcup.data_10_percent.gz"),
        ),
        reader=Reader(columns=tuple(_KDD_COLUMNS.split())),
    ),
    "airline": DataSet(
        "binary",
        (182915, 13),
        "flights of January 2008 that left more than 5 minutes late and arrived; 1 is ArrDelay > "
        "15 minutes; only columns known before landing, so none of "
        + _AIRLINE_AT_ARRIVAL
        + "; also "
        "without the row number and "
        + _AIRLINE_NO_USE
        + "; carrier, origin and destination are categories",
        "US Bureau of Transportation Statistics; rebuilt from "
        "TrivadisPF/platys-modern-data-platform (Apache-2.0)",
        _file(
            "airline-delayed-2008-01.csv.gz",
            "f7cc2c476cd8785964146f6fb38aff19c157a22340b3955757478f5bd32af15d",
            "8f17aaec457b3286c78f3c702657681150668556602bbe8031ba0adcd420f65f",
        ),
        "delayed",
        ("unnamed-1", *_AIRLINE_AT_ARRIVAL.split(), *_AIRLINE_NO_USE.split()),
        prepare=_airline,
    ),
    "adult": DataSet(
        "binary",
        (48842, 14),
        "census rows, training and test together; >50K or <=50K; text columns are categories",
        "UCI; copy in h2oai/h2o-2 (Apache-2.0)",
        _file(
            "adult.txt.gz",
            "4f4103477656b4bc4e6daec9d6ee93323c33297fa562df1822484398f9424149",
            "a222c5ed190c98301f5cd94ea0c6d00a3a3afd1b92aa4f0413e1636990ce9e84",
            _github("h2oai/h2o-2", "be350f3f", "smalldata/adult.gz"),
        ),
        "income",
        reader=Reader("csv", delimiter=" ", columns=tuple(_ADULT_COLUMNS.split())),
    ),
    "agaricus": DataSet(
        "binary",
        (6513, 126),
        "mushrooms as 0/1 columns; 1 is poisonous",
        "UCI; copy in dmlc/xgboost (Apache-2.0)",
        _file(
            "agaricus-train.libsvm",
            "915c2def06e9b44a306ad097fe8b6652c7c477d9c1e605bd2130ad20a70a8ad6",
            url=_github("dmlc/xgboost", "379b29f0", "demo/data/agaricus.txt.train"),
        ),
        reader=Reader(n_features=126),
    ),
    "agaricus-test": DataSet(
        "binary",
        (1611, 126),
        "test rows of agaricus",
        "UCI; copy in dmlc/xgboost (Apache-2.0)",
        _file(
            "agaricus-test.libsvm",
            "765db79391141953d890ce197fe828a621d6487fbba4de5e4d2217bd140371c0",
            url=_github("dmlc/xgboost", "379b29f0", "demo/data/agaricus.txt.test"),
        ),
        reader=Reader(n_features=126),
    ),
}
