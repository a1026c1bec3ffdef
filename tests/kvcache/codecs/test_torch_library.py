"""Without torch the codecs say what to install."""

import runpy
import sys
from pathlib import Path

import pytest

from kvstore.kvcache.codecs import torch_library as codec_torch
from kvstore.protocol.errors import ConfigError


def test_without_torch_it_is_one_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[hbm\]'"):
        runpy.run_path(str(Path(codec_torch.__file__)))
