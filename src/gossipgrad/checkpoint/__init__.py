"""A rank's state as a file: saved without waiting for others, loaded only if it is undamaged."""

from ._consensus import consensus as consensus
from ._consensus import export_safetensors as export_safetensors
from ._layout import Manifest as Manifest
from ._layout import find as find
from ._layout import latest as latest
from ._layout import steps as steps
from ._load import load as load
from ._model import model_tensors as model_tensors
from ._model import try_to_write as try_to_write
from ._model import write_safetensors as write_safetensors
from ._save import remove_all as remove_all
from ._save import rewind as rewind
from ._save import save as save
from ._saver import Saver as Saver
from ._saver import SaverStats as SaverStats
