"""Checkpoints of `.safetensors` files: their headers and indices, validated before anything is used."""

from .folder import CONFIG as CONFIG
from .folder import INDEX as INDEX
from .folder import Folder as Folder
from .folder import open_folder as open_folder
from .header import DTYPES as DTYPES
from .header import File as File
from .header import FileFault as FileFault
from .header import Tensor as Tensor
from .header import damaged as damaged
from .header import dtype_name as dtype_name
