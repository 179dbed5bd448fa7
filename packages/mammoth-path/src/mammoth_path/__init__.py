"""Gigapixel pathology with MAMMOTH: slides in, multiple-instance predictions and heat-maps out."""

__version__ = "0.1.0"
