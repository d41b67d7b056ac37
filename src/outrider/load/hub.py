"""Models of the Hugging Face hub, through its own library and its own cache. Only safe files are taken.

`huggingface_hub` is imported inside functions: it takes a good part of a second, and commands that only list
models must not wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelNotFound

# Pickle weights can run code when they are read: no pattern matches them.
WANTED = ("*.safetensors", "*.json", "*.jinja")
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights


@dataclass(frozen=True, slots=True)
class HubId:
    repo: str
    file: str | None = None  # one .gguf of the repository

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


def hub_cache() -> Path:
    """Where the hub's library keeps its files, by the same variables it reads."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def folder_of(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def snapshots(repo: str) -> list[Path]:
    """Revisions of a repository in the cache that have weights Outrider reads, the newest first."""
    found = [s for s in (folder_of(repo) / "snapshots").glob("*") if weights(s)]
    return sorted(found, key=lambda s: s.stat().st_mtime, reverse=True)


def fetch(model: HubId) -> Path:
    """The snapshot folder or `.gguf` file of `model`, downloaded if need be, else from the cache."""
    from huggingface_hub import errors

    try:
        with _bars_where_people_look():
            return _online(model)
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"{model.repo} asks for consent: accept its terms on its page at the hub, then set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"the hub has no repository {model.repo!r}; if it is private, set HF_TOKEN"
        ) from None
    except errors.RemoteEntryNotFoundError:
        raise ModelNotFound(f"{model.repo} has no file {model.file!r}") from None
    except ModelNotFound:
        raise
    except Exception as problem:  # offline mode, or one of many kinds of network failure
        if reason := _not_stored(problem):
            raise ModelNotFound(
                f"{model.repo} cannot be stored in {hub_cache()}: {reason}; make room there, or set HF_HOME to "
                "another folder"
            ) from None
        return _cached(model, problem)


def _not_stored(problem: Exception) -> str | None:
    """What the disk refused; of a library that is not Python's, by its words. A network's errors are OSErrors, too."""
    if isinstance(problem, OSError) and problem.errno in UNWRITABLE:
        return problem.strerror
    words = (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
    return next((said for said in words if said in str(problem)), None)


def _online(model: HubId) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if model.file is not None:
        return Path(hf_hub_download(model.repo, model.file))
    # Not list_repo_files: it retries for half a minute where there is no network at all.
    siblings = HfApi().model_info(model.repo, timeout=10).siblings or []
    files = [sibling.rfilename for sibling in siblings]
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        return Path(
            snapshot_download(model.repo, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED))
        )
    ggufs = [name for name in files if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return Path(hf_hub_download(model.repo, ggufs[0]))
    if ggufs:
        choices = "".join(f"\n    {model.repo}:{name}" for name in ggufs)
        raise ModelNotFound(f"{model.repo} holds several .gguf files; name one of them:{choices}")
    raise ModelNotFound(f"{model.repo} has no .safetensors and no .gguf file; other weights are not read")


def _cached(model: HubId, problem: Exception) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if model.file is not None:
            return Path(hf_hub_download(model.repo, model.file, local_files_only=True))
        return Path(snapshot_download(model.repo, local_files_only=True))
    except Exception:
        what = f"--include {model.file!r}" if model.file else "--include '*.safetensors' '*.json' '*.jinja'"
        folder = folder_of(model.repo)
        first = str(problem).strip().split("\n")[0][:200]
        raise ModelNotFound(
            f"{model.repo} is not in the cache and the hub cannot be reached: {first}\n"
            f"On a machine with a connection run\n"
            f"    hf download {model.repo} {what}\n"
            f"and copy its folder {folder.name} to\n"
            f"    {folder}\n"
            f"or put its files in any folder and give that folder's path."
        ) from None


@contextlib.contextmanager
def _bars_where_people_look() -> Iterator[None]:
    """The hub's library draws its own bars; in a log they would be thousands of lines."""
    from huggingface_hub import utils

    if sys.stderr.isatty() or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def cached_models() -> Iterator[tuple[str, Path]]:
    """Repositories in the hub's cache that have weights Outrider reads, and their newest snapshot."""
    with contextlib.suppress(OSError):
        for folder in sorted(hub_cache().glob("models--*--*")):
            repo = folder.name.removeprefix("models--").replace("--", "/")
            if found := snapshots(repo):
                yield repo, found[0]


def weights(folder: Path) -> list[Path]:
    found = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return [file for file in found if file.is_file()]
