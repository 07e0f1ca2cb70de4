"""The configs that come with the package, by name: what a newcomer can plan without a file."""

from difflib import get_close_matches
from pathlib import Path

from kvstore.errors import PlanError

CONFIGS = Path(__file__).parent / "configs"
"""One JSON file for each model: the fields of its Hugging Face config that its caches follow from."""


def bundled_models() -> tuple[str, ...]:
    """Names of the models whose configs come with the package, sorted.

    `plan_cache` and `specs_from_config` take such a name in the place of a path.
    """
    return tuple(sorted(path.name.removesuffix(".json") for path in CONFIGS.glob("*.json")))


def bundled_config(name: str) -> Path:
    """The config of a bundled model. Raises: PlanError for another name."""
    known = bundled_models()
    if name not in known:
        near = get_close_matches(name.rpartition("/")[2].removesuffix(".json").lower(), known, n=1)
        raise PlanError(
            "config: expected the path of a JSON file or of a folder with a config.json, or the name of a bundled "
            f"model{f' such as {near[0]!r}' if near else ''} (kvstore plan --list shows them; nothing is downloaded), "
            f"got {name!r}, which is neither"
        )
    return CONFIGS / f"{name}.json"
