"""A Python file of the user that says what to fit: `model()`, `train_loader()`, perhaps `test_loader()`."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from whence import WhenceError
from whence.errors import InputError


class SpecFile:
    """The functions of such a file, with what goes wrong in them told as a fault of that file.

    Args:
        path: of the file, which is run.
    """

    def __init__(self, path: Path) -> None:
        """Run the file."""
        if not path.is_file():
            raise InputError(
                f"expected a Python file that defines model() and train_loader(), got {path}, which does not exist."
            )
        self.path = path
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._module = self._run()
        missing = [name for name in ("model", "train_loader") if not callable(getattr(self._module, name, None))]
        if missing:
            raise InputError(
                f"expected {path} to define functions model() and train_loader(), got no {' and no '.join(missing)}."
            )

    def model(self) -> nn.Module:
        """The trained network, in evaluation mode."""
        model = self._call("model")
        if not isinstance(model, nn.Module):
            raise InputError(
                f"expected model() in {self.path} to return a torch.nn.Module, got {type(model).__name__}."
            )
        return model.eval()

    def loader(self, name: str) -> Any:
        """What one of its functions returns, such as `test_loader`."""
        if not callable(getattr(self._module, name, None)):
            raise InputError(f"expected {self.path} to define a function {name}(), got none.")
        return self._call(name)

    def has(self, name: str) -> bool:
        """Whether it defines a function."""
        return callable(getattr(self._module, name, None))

    def options(self) -> dict[str, Any]:
        """Arguments of `whence.fit`, from `fit_options()` where it is defined."""
        found = self._call("fit_options") if self.has("fit_options") else {}
        if not isinstance(found, dict):
            raise InputError(f"expected fit_options() in {self.path} to return a dict, got {type(found).__name__}.")
        return dict(found)

    def _call(self, name: str) -> Any:
        function: Callable[[], Any] = getattr(self._module, name)
        return self._guard(function, f"{name}()")

    def _run(self) -> ModuleType:
        name = f"whence_spec_{self.digest[:12]}"
        found = spec_from_file_location(name, self.path)
        if found is None or found.loader is None:
            raise InputError(f"expected a Python file, named something.py, got {self.path}.")
        module = module_from_spec(found)
        folder = str(self.path.resolve().parent)
        sys.path.insert(0, folder)  # so that it imports its neighbours, as it would when run by itself
        sys.modules[name] = module  # so that its classes know their module
        loader = found.loader
        try:
            self._guard(lambda: loader.exec_module(module), "the file")
        finally:
            sys.path.remove(folder)
        return module

    def _guard(self, work: Callable[[], Any], what: str) -> Any:
        try:
            return work()
        except WhenceError:
            raise
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path)]
            where = f", line {frames[-1].lineno}" if frames else ""
            raise InputError(f"{what} in {self.path} failed{where}: {type(error).__name__}: {error}") from error
