"""Packaging: the top-level folders are installed as subpackages of ``onnxremat``.

``exporters/``, ``scheduler/`` and ``models/`` are imported as ``onnxremat.exporters`` and so on, because a user's own project may well have
a ``scheduler.py`` or a ``models/`` beside its scripts.  In a source checkout three relative symlinks serve the same import paths.
"""

import os
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
FOLDERS = ("exporters", "scheduler", "models")

package_dir = {"onnxremat": "onnxremat"}
packages = ["onnxremat"]
for folder in FOLDERS:
    package_dir[f"onnxremat.{folder}"] = folder
    packages.append(f"onnxremat.{folder}")
    packages += [f"onnxremat.{folder}.{name}" for name in find_packages(folder)]
# The symlinked folders are listed above under their real paths; anything else below onnxremat/ is found as usual.
packages += [f"onnxremat.{name}" for name in find_packages("onnxremat") if name.split(".")[0] not in FOLDERS]

setup(
    name="onnxremat",
    version="0.1.0",
    description="Fit the training of a neural network into the memory at hand: rematerialization for ONNX training graphs",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=packages,
    package_dir=package_dir,
    # Libraries without a line of Python in them, loaded by ctypes. Without a compiler the package installs too, and plans more slowly.
    ext_modules=[
        Extension(
            "onnxremat.scheduler._annealer",
            ["scheduler/_annealer.c"],
            # Without fused multiply-adds, so that it rounds as its Python twin does.
            extra_compile_args=[] if os.name == "nt" else ["-O3", "-ffp-contract=off"],
            libraries=[] if os.name == "nt" else ["m"],
            optional=True,
        ),
        Extension("onnxremat.placement._arena", ["onnxremat/placement/_arena.c"], optional=True),
        Extension(
            "onnxremat.placement._offsets",
            ["onnxremat/placement/_offsets.c"],
            extra_compile_args=[] if os.name == "nt" else ["-O3"],
            optional=True,
        ),
        # Operators for ONNX Runtime; where it is missing it is built on first use, so its source is installed as well.
        Extension("onnxremat.spill._spill", ["onnxremat/spill/_spill.c"], extra_compile_args=["-fvisibility=hidden"], optional=True),
    ],
    package_data={
        "onnxremat": ["py.typed", "templates/*.html"],
        "onnxremat.models": ["*.yaml"],
        "onnxremat.spill": ["_spill.c"],
    },
    install_requires=[
        "numpy>=1.26",
        "onnx>=1.20,<1.24",
        "onnx-ir>=1.1,<1.2",
        "onnxscript>=0.7.2,<0.8",
        "networkx>=3.2",
        "scipy>=1.11",
        "PyYAML>=6.0",
    ],
    extras_require={
        # Exactly one of the three: they own the same import folder.
        "cpu": ["onnxruntime-training-cpu==1.19.2"],
        "cuda": ["onnxruntime-training==1.19.2"],
        "stock": ["onnxruntime"],
        # For the strategy of that name; wants an older protobuf than constraints.txt pins.
        "moccasin": ["ortools>=9.12"],
        # Needed to export a PyTorch model and to compare with torch; not needed to train.
        "torch": ["torch>=2.13"],
        # For pictures as .png.
        "png": ["pillow>=10.1"],
        # To hand the jobs of `zoo compile` to a cluster.
        "cluster": ["distributed>=2024.1"],
        "dev": [
            "hypothesis>=6.100",
            "mypy>=1.10",
            "pytest>=8.0",
            "pytest-xdist>=3.6",
            "ruff>=0.5",
            "scikit-learn>=1.4",
            "transformers>=5.0,<6.0",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["onnxremat=onnxremat.cli:main"]},
)
