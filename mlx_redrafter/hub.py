"""Models that are not shipped: local folders, and the Hugging Face Hub."""

from pathlib import Path

from mlx_redrafter.errors import CompatibilityError, DownloadError, FormatError
from mlx_redrafter.shipped import read_json

DRAFTER_TYPE = "recurrent_drafting_drafter"  # Apple's model_type for drafters

# What mlx-lm reads, less code; no pickles.
_PATTERNS = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


def check(folder: Path) -> Path:
    """See that mlx-lm can load the folder, as far as the files' names tell."""
    config = read_json(folder / "config.json")
    if config is None:
        raise FormatError(f"{folder} has no readable config.json: give a model in MLX format")
    if config.get("model_type") == DRAFTER_TYPE:
        raise CompatibilityError(f"{folder} is a drafter: give it as the drafter, not the model")
    weights = {path.name for path in folder.glob("model*.safetensors")}
    index = read_json(folder / "model.safetensors.index.json") or {}
    missing = set(index.get("weight_map", {}).values()) - weights
    if missing or not weights:
        lacking = min(missing, default="model.safetensors")
        raise FormatError(f"{folder} lacks {lacking}: fetch or convert the model again")
    return folder


def fetch(repo: str) -> Path:
    """The folder of a model on the Hub: fetched if it is new or has changed, never its code."""
    from huggingface_hub import errors, snapshot_download

    try:
        return check(Path(snapshot_download(repo, allow_patterns=list(_PATTERNS))))
    except errors.GatedRepoError as error:
        remedy = "accept its terms there and run `hf auth login`"
        raise DownloadError(f"{repo} is gated on the Hugging Face Hub: {remedy}") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DownloadError(
            f"no model {repo}: there is neither such a folder nor such a public model on the "
            "Hugging Face Hub"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(
            f"no model {repo}: there is no such folder, and the Hugging Face Hub cannot be "
            "reached to look there: check the network"
        ) from error
    except errors.HfHubHTTPError as error:
        reason = str(error).strip().partition("\n")[0]
        raise DownloadError(f"cannot fetch {repo} from the Hugging Face Hub: {reason}") from error
