"""Gigapixel pathology with MAMMOTH: slides in, multiple-instance predictions and heat-maps out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mammoth_path.data.encoders import load_encoder
    from mammoth_path.data.features import read_features
    from mammoth_path.data.slides import open_slide
    from mammoth_path.model.mammoth import Mammoth
    from mammoth_path.model.mil import MILModel
    from mammoth_path.train import load_model

__version__ = "0.1.0"

_HOME = {
    "MILModel": "mammoth_path.model.mil",
    "Mammoth": "mammoth_path.model.mammoth",
    "load_encoder": "mammoth_path.data.encoders",
    "load_model": "mammoth_path.train",
    "open_slide": "mammoth_path.data.slides",
    "read_features": "mammoth_path.data.features",
}
__all__ = ["MILModel", "Mammoth", "load_encoder", "load_model", "open_slide", "read_features"]


def __getattr__(name: str) -> Any:
    """Public names, imported at first use: `import mammoth_path` alone loads nothing heavy."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
