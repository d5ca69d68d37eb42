"""Build a model whose parameters have no memory, and whose buffers are initialized.

If everything were made on the meta device, buffers that no file has would be lost, such as the frequencies of rotary
embeddings. So only factories of uninitialised tensors make meta tensors, and each tensor that becomes a parameter is
moved to the meta device at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ..errors import CheckpointError, InputError
from ..sharding.base import DTensorBase
from .conversions import kept_dtypes

_TWIN = "_on_meta"
"""The attribute of a parameter that holds its replacement on the meta device, so that tied parameters stay tied."""


class _EmptyOnMeta(TorchFunctionMode):
    """A mode in which `torch.empty` and `torch.empty_strided` return meta tensors."""

    _FACTORIES = (torch.empty, torch.empty_strided)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in self._FACTORIES and kwargs.get("out") is None:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return parameter
    twin = getattr(parameter, _TWIN, None)
    if twin is None:
        twin = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        setattr(parameter, _TWIN, twin)
    return twin


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create modules inside with parameters on the meta device, and with initialized buffers."""
    hook = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]  # it may return another
    try:
        with _EmptyOnMeta():
            yield
    finally:
        hook.remove()


def build(model: object, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Return the module to load: `model` itself, or one built from a class of transformers or by a function."""
    if isinstance(model, nn.Module):
        if dtype is not None:
            _cast(model, dtype)
        return model
    if hasattr(model, "from_config") or hasattr(model, "config_class"):
        return _of_transformers(model, folder, dtype)
    if not callable(model):
        raise InputError(
            f"hub.load got a {type(model).__name__} as model",
            "pass a module, a class of transformers, or a function without arguments that returns a module",
        )
    with parameters_on_meta():
        built = model()
    if not isinstance(built, nn.Module):
        raise InputError(
            f"hub.load got a function that returned a {type(built).__name__}", "return an nn.Module from it"
        )
    if dtype is not None:
        _cast(built, dtype)
    return built


def _of_transformers(cls: Any, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    import transformers

    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json, from which to build a {cls.__name__}",
            f"pass a model: hub.load({cls.__name__}(config), ...)",
        )
    automatic = not hasattr(cls, "_from_config")
    config = (transformers.AutoConfig if automatic else cls.config_class).from_pretrained(folder)
    chosen = dtype if dtype is not None else getattr(config, "dtype", None) or torch.get_default_dtype()
    chosen = getattr(torch, chosen) if isinstance(chosen, str) else chosen
    with parameters_on_meta():
        model = cls.from_config(config, dtype=chosen) if automatic else cls._from_config(config, dtype=chosen)
    for key, kept in kept_dtypes(model, chosen).items():
        parameter = model.get_parameter(key)
        parameter.data = parameter.data.to(kept)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.config.name_or_path = str(folder)
    return model.eval()


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of a model; buffers keep their dtype."""
    kept = kept_dtypes(model, dtype)
    for key, parameter in model.named_parameters():
        wanted = kept.get(key, dtype)
        if not parameter.is_floating_point() or parameter.dtype == wanted:
            continue
        if isinstance(parameter, DTensorBase):
            raise InputError(
                f"hub.load got dtype={dtype} for a model with distributed parameters of {parameter.dtype}",
                "pass the model before it is distributed, with plan=, or leave dtype out",
            )
        parameter.data = parameter.data.to(wanted)
