"""Builds the image of docs/recipes/docker.md for the emulated device, and runs it as a user without a name.

The image has no CUDA toolkit and no development tools, which would hide that an extra lacks a package. ``nox -s
container`` runs this file. Needs a Docker daemon with the image python:3.12-slim; else it prints why it does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

import recipe_models  # noqa: E402
import recipes  # noqa: E402
from document_blocks import blocks  # noqa: E402

BASE = "python:3.12-slim"
IMAGE = "ort-cuda-plugin-recipe"
EMULATED = (
    ("[cuda,libs]", "[cpu]"),
    (" --arch sm_80,sm_90", ""),
    (' "nvidia-cublas>=13" "nvidia-cudnn-cu13>=9.13"', ""),
    ("\nENV ", "\nENV ORT_CUDA_PLUGIN_EMULATE=1 ORT_CUDA_PLUGIN_CONTEXT_ALLOW_HOST_CODE=1 "),
)
"""Passages of the recipe's Dockerfile, and what they are for the emulated device."""
RESTRICTED = ("--read-only", "--user", "12345", "--network", "none", "--cap-drop", "ALL", "--memory", "512m")


def docker(*arguments: str) -> str:
    """Run docker and return its standard output. Raises CalledProcessError if it fails."""
    return subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def is_available() -> bool:
    try:
        docker("image", "inspect", "--format", "{{.Id}}", BASE)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def write_context(folder: Path, recipe: recipes.Recipe) -> None:
    """Write the build context: the wheel, the model, the program and the Dockerfile for the emulated device."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "dist")]
    subprocess.run([*wheel, str(ROOT)], check=True)
    recipe_models.small_model(folder)
    (program,) = (block.text for block in recipe.code if block.language == "python")
    (folder / "app.py").write_text(program)
    text = next(block.text for block in blocks(recipe.text) if block.language == "dockerfile")
    for passage, replacement in EMULATED:
        assert passage in text, f"{recipe.path.name}: the Dockerfile has no {passage!r}"
        text = text.replace(passage, replacement)
    (folder / "Dockerfile").write_text(text)


def main() -> int:
    if not is_available():
        print(f"skipped: no Docker daemon with the image {BASE}; start a daemon, and `docker pull {BASE}`")
        return 0
    recipe = recipes.Recipe(recipes.FOLDER / "docker.md")
    with tempfile.TemporaryDirectory() as name:
        write_context(Path(name), recipe)
        print(docker("build", "--network", "host", "--tag", IMAGE, name))
    try:
        printed = docker("run", "--rm", *RESTRICTED, IMAGE)
    finally:
        docker("image", "rm", "--force", IMAGE)
    print(printed, end="")
    if printed != recipe.output:
        print(f"expected:\n{recipe.output}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
