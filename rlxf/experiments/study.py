"""Optuna studies of sweeps: storage, seeded suggestions, and checks that a study belongs to a sweep file."""

import json
import re
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rlxf.experiments.sweep_plan import SweepPlan
from rlxf.utils.tables import printable

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

IDENTITY = "rlxf_sweep"
"""Attribute of a study with `SweepPlan.identity`."""
REASON = "reason"
"""Attribute of a failed trial with the reason."""
FILE = "study.db"
"""Name of the default storage in the folder of a sweep."""
MAX_DATABASE = 2**28
"""Maximum size of the default storage; a trial takes about ten kB."""
URL_ADVICE = (
    ". It must be a file, or a URL such as sqlite:///study.db or postgresql://USER@HOST/NAME, whose driver "
    "is installed"
)
LOCK_SECONDS = 60
"""Time to wait for other processes that write to an SQLite file."""
MAX_VALUE = 2**24
"""Maximum size of a value or a row in an SQLite file, in bytes."""
CHECK_OF_OPTUNA = "CHECK (version_info_id=1)"
EXPRESSION = re.compile(
    r"\b(AS|VIRTUAL|CHECK|DEFAULT|WHERE)\b|--|/\*|^CREATE\b[^(]*\bINDEX\b.*\(.*\(", re.I | re.S
)
"""Pattern of table definitions with computed columns, defaults, conditions, comments or a module, and of
indices of expressions. Optuna's definitions have none, except for `CHECK_OF_OPTUNA`."""


class StorageError(OSError):
    """Error of the storage of a study."""


class OtherStudyError(ValueError):
    """Error about a study that belongs to another sweep.

    Args:
        reason: how they differ.
    """

    def __init__(self, reason: str):
        super().__init__(
            f"the study in the storage {reason}: move the folder of the sweep, or choose another one with "
            f"--output, or another --storage"
        )


def check_optuna() -> None:
    """Raise ImportError with the remedy if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"rlxf sweep needs Optuna, which is not installed: pip install 'rlxf[sweep]' ({error})"
        ) from error


def seeded_sampler(seed: int) -> "BaseSampler":
    """Return a `TPESampler` whose random numbers depend on the seed and the number of the trial only.

    A sweep that is continued therefore makes the suggestions of an uninterrupted one.

    Source: Watanabe 2023, "Tree-Structured Parzen Estimator: Understanding Its Algorithm Components and Their
    Roles for Better Empirical Performance", arXiv:2304.11127.
    """
    from optuna.samplers import TPESampler

    class SeededSampler(TPESampler):
        def before_trial(self, study: Any, trial: "FrozenTrial") -> None:
            number = (seed * 1_000_003 + trial.number) % 2**32
            TPESampler.__init__(self, seed=number, constant_liar=True)
            super().before_trial(study, trial)

    return SeededSampler(seed=seed, constant_liar=True)


class SweepStudy:
    """Study of a sweep.

    Args:
        plan: the sweep.
        storage: where the trials are stored.
        place: URL of a database, or path of a file, for messages.
        name: name of the study in the storage.
        private: whether all processes that use the storage share the folder of the sweep.

    Raises:
        OtherStudyError: if the study in the storage is that of another sweep.
    """

    def __init__(self, plan: SweepPlan, storage: "BaseStorage", place: str, name: str, private: bool):
        import optuna

        self.plan = plan
        self.storage = storage
        self.place = place
        self.name, self.private = name, private
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=optuna.study.StudyDirection[plan.direction.upper()],
            load_if_exists=True,
            sampler=seeded_sampler(plan.sampler_seed),
            pruner=_pruner(plan),
        )
        self._id = storage.get_study_id_from_name(name)
        trials = self.trials()  # first, because another process writes the attributes before its first trial
        attributes = self.study.user_attrs
        if not attributes and not trials:
            self.study.set_user_attr(IDENTITY, plan.identity())
        else:
            self._check(attributes.get(IDENTITY), trials)

    def _check(self, identity: Any, trials: "list[FrozenTrial]") -> None:
        """Raise ValueError if a study with trials was made by something else than the sweep file."""
        if not isinstance(identity, dict):
            raise OtherStudyError(f"with the name {self.name!r} was not made by rlxf sweep")
        if found := _difference(identity, json.loads(json.dumps(self.plan.identity()))):
            raise OtherStudyError(f"{found} in {self.plan.path}")
        for trial in trials:
            for name, value in trial.params.items():
                dimension = self.plan.space.options.get(name)
                if dimension is None or not dimension.contains(value):
                    raise OtherStudyError(
                        f"has a trial {trial.number} with {shown(name)} = {shown(value)}, which is not in "
                        f"the search space"
                    )

    def trials(self) -> "list[FrozenTrial]":
        """Return all trials in the order of their numbers."""
        return sorted(self.study.get_trials(deepcopy=False), key=lambda trial: trial.number)

    def trial(self, number: int) -> "Trial":
        """Return an existing trial that is to be continued."""
        from optuna.trial import Trial

        return Trial(self.study, self._trial_id(number))

    def frozen(self, number: int) -> "FrozenTrial":
        """Return the state of a trial in the storage."""
        return self.storage.get_trial(self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def complete(self) -> "list[FrozenTrial]":
        """Return the complete trials, the best one first."""
        found = [each for each in self.trials() if each.state.name == "COMPLETE" and each.value is not None]
        sign = -1 if self.plan.direction == "maximize" else 1
        return sorted(found, key=lambda trial: (sign * (trial.value or 0.0), trial.number))

    def searched(self, trial: "FrozenTrial") -> dict[str, Any]:
        """Return name -> value of the searched options of a trial.

        Raises:
            ValueError: if the trial lacks one of them.
        """
        return self.plan.space.restore(trial.params, self.plan.fixed)


def _difference(stored: Any, given: Any, name: str = "") -> str | None:
    """Return the first difference of two JSON values in words; None if they are equal."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in dict.fromkeys([*given, *stored]):
            if found := _difference(stored.get(key), given.get(key), f"{name}.{key}" if name else key):
                return found
        return None
    if type(stored) is type(given) and stored == given:
        return None
    return f"has {shown(name)} = {shown(stored)} in place of {shown(given)}"


def shown(value: Any) -> str:
    """Return a value from a storage for a message, as JSON in one line of limited length."""
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value)
    text = printable(text.replace("\n", " "))
    return text if len(text) <= 120 else f"{text[:117]}..."


def _pruner(plan: SweepPlan) -> "BasePruner":
    from optuna.pruners import MedianPruner, NopPruner

    if plan.pruning is None:
        return NopPruner()
    return MedianPruner(n_startup_trials=plan.pruning.startup_trials)


def open_study(plan: SweepPlan, folder: Path, storage: str | None = None) -> SweepStudy:
    """Open the study of a sweep, or create it.

    Args:
        plan: the sweep.
        folder: folder of the sweep, which exists.
        storage: URL of a database, or path of a journal file; None for the SQLite file in the folder.

    Raises:
        ImportError: if Optuna is not installed.
        OtherStudyError: if the study in the storage is that of another sweep.
        StorageError: if the storage cannot be used.
        ValueError: if SQLAlchemy cannot open files in this folder.
    """
    check_optuna()
    from optuna.logging import CRITICAL, set_verbosity

    set_verbosity(CRITICAL)
    private = storage is None
    if private:
        check_database(folder / FILE)
    url = _sqlite_url(folder / FILE) if storage is None else storage
    with storage_errors(url, URL_ADVICE):
        opened = _storage(url)
        return SweepStudy(plan, opened, url, _study_name(plan, opened, private), private)


def _sqlite_url(file: Path) -> str:
    """Return the URL with which SQLAlchemy opens an SQLite file.

    In a URL, "?" begins options. SQLAlchemy decodes "%41" since version 2.1, and earlier versions do not.

    Raises:
        ValueError: if no URL names the file, which is possible before version 2.1 only.
    """
    from sqlalchemy import make_url

    for path in (str(file), quote(str(file), safe="/ ")):
        if make_url(f"sqlite:///{path}").database == str(file):
            return f"sqlite:///{path}"
    raise ValueError(
        f"the study cannot be stored in {file}, because URLs of databases cannot contain this path: choose "
        f'another folder with --output, without "?", or install sqlalchemy 2.1 or newer'
    )


def _study_name(plan: SweepPlan, storage: "BaseStorage", private: bool) -> str:
    """Return the name of the sweep file, or that of the study that a private storage already has."""
    name = plan.path.stem
    names = [study.study_name for study in storage.get_all_studies()] if private else []
    return name if name in names or not names else names[0]


def _storage(url: str) -> "BaseStorage":
    from optuna.storages import JournalStorage, RDBStorage

    if "://" not in url:
        from optuna.storages.journal import JournalFileBackend

        return JournalStorage(JournalFileBackend(url))
    arguments = {"timeout": LOCK_SECONDS, "factory": _BoundedConnection}
    return RDBStorage(url, engine_kwargs={"connect_args": arguments} if url.startswith("sqlite:") else {})


class _BoundedConnection(sqlite3.Connection):
    """Connection to an SQLite file whose values have at most `MAX_VALUE` bytes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)


def check_database(path: Path) -> None:
    """Raise ValueError if an SQLite file is too large, or contains more than tables with stored values.

    A view, a trigger, or an expression in a definition could produce any amount of data from a small file.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link; replace it by a copy of its target")
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: remove it")
    if path.stat().st_size > MAX_DATABASE:
        raise ValueError(f"{path} has more than {MAX_DATABASE:,} bytes: choose another folder with --output")
    try:
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)
        ) as base:
            objects = base.execute("SELECT type, sql FROM sqlite_master").fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be read as an SQLite file ({error}): move it away") from error
    if any(kind not in ("table", "index") or _has_expression(sql or "") for kind, sql in objects):
        raise ValueError(
            f"{path} has views, triggers or computed values, so it was not made by rlxf: remove it"
        )


def _has_expression(definition: str) -> bool:
    return EXPRESSION.search(definition.replace(CHECK_OF_OPTUNA, "")) is not None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, e.g. those about experimental features of Optuna."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def storage_errors(place: str, advice: str = "") -> Iterator[None]:
    """Raise errors of a storage as `StorageError` in one line; errors that name another file stay.

    Args:
        place: URL of the database, or path of the file.
        advice: end of the message.
    """
    try:
        yield
    except (StorageError, OtherStudyError):
        raise
    except Exception as error:  # of any database driver
        own = str(Path(place.removeprefix("sqlite:///")))
        if isinstance(error, OSError) and not str(error.filename or own).startswith(own):
            raise
        raise _storage_error(place, error, advice) from error


def _storage_error(place: str, error: BaseException, advice: str) -> StorageError:
    public = re.sub("//[^/]*@", "//", place)  # without the password
    while error.__cause__ is not None:  # the error of the driver, e.g. that the disk is full
        error = error.__cause__
    first = f"{type(error).__name__}: {error}".split("\n")[0]
    return StorageError(f"cannot use the storage {public}: {shown(first)}{advice}")
