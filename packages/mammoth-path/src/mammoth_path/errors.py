"""What can be wrong with slides, bags and models."""

from shared_moe.errors import InputError, RefusedError, ShapeError, UnreadableError

ENCODER_WIDTHS = {
    "CONCH": 512,
    "CONCH 1.5, CTransPath, Phikon": 768,
    "UNI, DenseNet121, truncated ResNet50, Phikon v2": 1024,
    "EfficientNet-Lite0": 1280,
    "UNI2, GigaPath, H-optimus": 1536,
    "Virchow": 2560,
}


class ConfigError(InputError):
    """A model cannot be built as asked."""


class EmptyBagError(InputError):
    """A bag without a single real patch."""


class FeatureWidthError(ShapeError):
    """Features come from another encoder than the model was made for."""


class SlideError(UnreadableError):
    """A slide cannot be opened or read."""


class ScaleError(RefusedError):
    """The physical scale of a slide is unknown, absurd, or too coarse for what was asked."""


class NoTissueError(RefusedError):
    """No tissue was found."""


def encoders_of_width(width: int) -> str:
    """Known encoders with this feature width, in words."""
    names = [name for name, w in ENCODER_WIDTHS.items() if w == width]
    return f"{width} is the width of {names[0]}" if names else f"no encoder known here is {width} wide"
