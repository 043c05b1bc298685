"""A model of the Hugging Face hub as a directory: what serving needs of it, in huggingface_hub's own cache.

First the small files, which tell whether the model can be served at all; then the weights, file by file.
Complete files stay in the cache, so that a start that was cut off goes on with the file it was at. The
library reads HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and so on itself, when it is imported; that is
done here only, since it takes half a second.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.weight_files import INDEX_FILE, SINGLE_FILE, shard_names

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many units of it are done, and how many there are."""

# What a repository without config.json is instead.
_TELLING_FILES = ("adapter_config.json", "model_index.json", "params.json")
# All that is read of a model beside its weights.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
    *_TELLING_FILES,
)
# The library goes on where a connection was closed; one that was reset makes it give the file up.
_ATTEMPTS = 4
_NAME = re.compile(r"(?P<repo>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubModel:
    """org/name, or the bare name of an old repository; revision: a branch, a tag or a commit, None: main."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubModel | None:
        """What `org/name` or `org/name@revision` names; None if it cannot be a hub id."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(found["repo"], found["revision"])

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def fetch_model(
    model: HubModel, *, has_weights: bool, progress: Progress, check: Callable[[Path], None]
) -> Path:
    """The directory of `model` in the hub's cache, fetched as far as it is not there.

    has_weights: fetch them too. check: called with the directory before that; raises if it cannot be served.
    Without a connection, or with HF_HUB_OFFLINE, what is in the cache is enough. Imports no torch. Raises
    ModelLoadError for everything that goes wrong.
    """
    with explained(model):
        progress("fetching configuration", 0, 1)
        directory = _fetch_small_files(model)
        progress("fetching configuration", 1, 1)
        listing = _listing(model, directory)
        _refuse_incomplete(model, directory, listing)
        check(directory)
        if has_weights:
            names = _weight_names(model, directory, listing)
            _fetch_weights(model, directory, names, listing, progress)
    return directory


def _fetch_small_files(model: HubModel) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=list(_SMALL_FILES),
            library_name="forkpoint",
            tqdm_class=_bar_class(lambda num_bytes: None),
        )
    )


def _listing(model: HubModel, directory: Path) -> dict[str, RepoFile]:
    """The files of the repository at this commit, as the library noted them when it fetched the first."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {file.path: file for file in get_cached_repo_tree(model.repo, revision=directory.name)}
    except CachedRepoTreeNotFoundError:  # fetched by an older version of the library, and no connection now
        return {}


def _refuse_incomplete(model: HubModel, directory: Path, listing: dict[str, RepoFile]) -> None:
    """Raise for a repository that is no model in Hugging Face layout; what `check` explains better passes."""
    if (directory / "config.json").is_file():
        if not (directory / "tokenizer.json").is_file():
            raise ModelLoadError(
                f"{model} has no tokenizer.json",
                hint="make one with transformers: AutoTokenizer.from_pretrained(X).save_pretrained(X)",
            )
    elif not any((directory / name).is_file() for name in _TELLING_FILES):
        is_gguf = any(name.endswith(".gguf") for name in listing)
        raise ModelLoadError(
            f"{model} has no config.json" + (", only GGUF files" if is_gguf else ""),
            hint="download one of its GGUF files and give its path" if is_gguf else "is it a language model?",
        )


def _weight_names(model: HubModel, directory: Path, listing: dict[str, RepoFile]) -> list[str]:
    if (directory / INDEX_FILE).is_file():
        return shard_names(directory / INDEX_FILE)
    if listing and SINGLE_FILE not in listing:
        pickled = sorted(name for name in listing if name.endswith((".bin", ".pt", ".pth")))
        if pickled:
            raise ModelLoadError(
                f"{model} has no safetensors, only {pickled[0]}: pickled weights can run code, so they are "
                "not fetched",
                hint="convert them: load with transformers and save_pretrained() writes safetensors",
            )
        raise ModelLoadError(
            f"{model} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            hint="only models in safetensors are served",
        )
    return [SINGLE_FILE]


def _fetch_weights(
    model: HubModel, directory: Path, names: list[str], listing: dict[str, RepoFile], progress: Progress
) -> None:
    missing = [name for name in names if not (directory / name).is_file()]
    sizes = {name: listing[name].size for name in missing if name in listing}
    _require_space(model, sum(sizes.values()))
    total = sum(sizes.values())
    done = 0
    # One after the other: a thread pool would keep Ctrl-C waiting for the files that are under way, and the
    # hub's own transport (xet) fetches parts of a file in parallel.
    for name in missing:
        before = done

        def count(num_bytes: int, before: int = before) -> None:
            progress("fetching weights", min(before + num_bytes, total), total)

        _fetch_file(model, directory, name, count)
        done = before + sizes.get(name, 0)


def _fetch_file(model: HubModel, directory: Path, name: str, count: Callable[[int], None]) -> None:
    import httpx2
    from huggingface_hub import hf_hub_download

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            hf_hub_download(
                model.repo,
                name,
                revision=directory.name,
                library_name="forkpoint",
                tqdm_class=_bar_class(count),
            )
            return
        except httpx2.NetworkError:
            if attempt == _ATTEMPTS:
                raise


def _bar_class(count: Callable[[int], None]) -> type[Any]:
    """A progress bar for the library that draws nothing and tells `count` the bytes of its file so far."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self._num_bytes = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self._num_bytes += int(n or 0)
            count(self._num_bytes)

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the way, where they are counted apart from those that are in the file."""

        def set_transfer_postfix_str(self, postfix: str, refresh: bool = False) -> None:
            """Their rate."""

    return Bar


def _require_space(model: HubModel, num_bytes: int) -> None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ModelLoadError(
            f"the weights of {model} take {num_bytes / 2**30:,.1f} GiB; {free / 2**30:,.1f} GiB are free in "
            f"{constants.HF_HUB_CACHE}",
            hint="make room, or set HF_HOME to a folder on a larger disk",
        )


@contextmanager
def explained(model: HubModel) -> Iterator[None]:
    """Turn what the library raises into one sentence and what to do."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as exc:
        raise ModelLoadError(f"{model} is no directory here, and no hub id: {_first_line(exc)}") from exc
    except errors.GatedRepoError as exc:
        raise _gated(model) from exc
    except errors.RevisionNotFoundError as exc:
        raise ModelLoadError(
            f"{model.repo} has no revision {model.revision} on the hub",
            hint="see its branches and tags there",
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ModelLoadError(
            f"{model.repo} is no directory here, and the hub has no such model, or it is private",
            hint="check the spelling; for a private model set HF_TOKEN",
        ) from exc
    except errors.LocalEntryNotFoundError as exc:
        raise _unreachable(model, exc) from exc
    except errors.HfHubHTTPError as exc:
        raise _refused(model, exc) from exc
    except httpx2.HTTPError as exc:
        raise ModelLoadError(
            f"fetching {model} broke off: {_first_line(exc) or type(exc).__name__}",
            hint="start again: files that are complete are kept",
        ) from exc
    except OSError as exc:
        raise _disk(model, exc) from exc


def _gated(model: HubModel) -> ModelLoadError:
    from huggingface_hub import constants, get_token

    page = f"{constants.ENDPOINT}/{model.repo}"
    if get_token() is None:
        return ModelLoadError(
            f"{model.repo} is gated: its owner asks to accept terms first",
            hint=f"accept them at {page}, then set HF_TOKEN to a token of yours",
        )
    return ModelLoadError(
        f"{model.repo} is gated, and your token has no access to it",
        hint=f"ask for access at {page} with the account of the token",
    )


def _unreachable(model: HubModel, error: Exception) -> ModelLoadError:
    from huggingface_hub import constants, errors, try_to_load_from_cache

    is_partial = isinstance(try_to_load_from_cache(model.repo, "config.json", revision=model.revision), str)
    found = "is only in part in the cache" if is_partial else "is neither a directory here nor in the cache"
    if constants.is_offline_mode():
        return ModelLoadError(
            f"{model} {found}, and HF_HUB_OFFLINE forbids to fetch it",
            hint="unset HF_HUB_OFFLINE, or give a model directory",
        )
    cause = error.__cause__
    if isinstance(cause, errors.HfHubHTTPError):
        return _refused(model, cause)
    return ModelLoadError(
        f"{model} {found}, and the hub at {constants.ENDPOINT} cannot be reached",
        hint="check the connection (HF_ENDPOINT, HTTPS_PROXY), or give a model directory",
    )


def _refused(model: HubModel, error: Any) -> ModelLoadError:
    from huggingface_hub import constants, get_token

    status = error.response.status_code
    if status in (401, 403):
        token = "no token is set" if get_token() is None else "the token is not accepted"
        return ModelLoadError(
            f"the hub refuses {model} ({status}): {token}", hint="set HF_TOKEN to a token that may read it"
        )
    return ModelLoadError(
        f"the hub at {constants.ENDPOINT} answers {status} for {model}",
        hint=f"try again later, or look at {constants.ENDPOINT}/{model.repo}",
    )


def _disk(model: HubModel, error: OSError) -> ModelLoadError:
    from huggingface_hub import constants

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelLoadError(
            f"the disk of {constants.HF_HUB_CACHE} is full; fetching {model} broke off",
            hint="make room, or set HF_HOME to a folder on a larger disk",
        )
    return ModelLoadError(
        f"{model} cannot be kept in {constants.HF_HUB_CACHE}: {_first_line(error)}",
        hint="set HF_HOME to a folder that may be written",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
