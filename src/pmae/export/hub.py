"""Exported folders on the Hugging Face hub: only when asked to, and private unless told otherwise."""

import re
from pathlib import Path

from huggingface_hub import HfApi, get_token

from pmae.errors import UserError, require
from pmae.remote import reaching


def require_hub(repo: str) -> None:
    """Refuse a name that is none, and a machine without a token, before anything is written."""
    require(re.fullmatch(r"[\w.-]+/[\w.-]+", repo) is not None, "push", "a repository, USER/NAME", repo)
    if get_token() is None:
        rule = "needs a token of the Hugging Face hub: `hf auth login`, or the variable HF_TOKEN"
        raise UserError(f"push to {repo!r} {rule}")


def contents(folder: Path | str) -> list[str]:
    """What an upload would send, a line a file with its size."""
    root = Path(folder).expanduser()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [f"  {path.stat().st_size:>12,} bytes  {path.relative_to(root).as_posix()}" for path in files]


def push(folder: Path | str, repo: str, public: bool = False) -> str:
    """Upload a folder that `export` wrote, and return its address; a repository that is there keeps its visibility."""
    require_hub(repo)
    folder = Path(folder).expanduser()
    require((folder / "preprocessing.json").is_file(), "folder", "one that export wrote", str(folder))
    with reaching(f"the repository {repo}"):
        hub = HfApi(library_name="pmae")
        hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="pmae export")
        return f"{hub.endpoint}/{repo}"
