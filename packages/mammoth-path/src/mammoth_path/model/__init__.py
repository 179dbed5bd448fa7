"""MAMMOTH and the multiple-instance models around it."""

from mammoth_path.errors import EmptyBagError
from mammoth_path.model.mammoth import Mammoth
from mammoth_path.model.mil import MILModel, MILOutput

__all__ = ["EmptyBagError", "MILModel", "MILOutput", "Mammoth"]
