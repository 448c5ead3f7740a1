"""A rank's state as files: saved without waiting for anyone, loaded only if nothing is amiss."""

from ._consensus import consensus as consensus
from ._consensus import export_safetensors as export_safetensors
from ._files import FileEntry as FileEntry
from ._layout import Manifest as Manifest
from ._layout import latest as latest
from ._layout import manifest as manifest
from ._layout import members as members
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
