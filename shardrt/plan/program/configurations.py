"""Causal language models of transformers by their configuration, without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .factory import describe
from .hugging_face import quiet
from .job import PlanError


def configured_factory(source: str) -> Callable[[], nn.Module]:
    """The factory of the model that a configuration describes, in float32.

    source: a `config.json`, a folder that has one, or the name of a model, whose configuration is read from transformers' cache
    or loaded over the network. Code that a configuration names is not run.
    Raises PlanError if there is no such configuration, no causal language model for it, or no transformers.
    """
    what = f"model {source}"
    with importing_transformers(what):
        from transformers import AutoConfig, AutoModelForCausalLM
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise PlanError(f"{what}: expected a folder with a config.json")
    if not path.exists() and (path.suffix == ".json" or path.is_absolute() or source.count("/") > 1):
        raise PlanError(f"{what}: there is no such file or folder; expected a config.json, or a folder that has one")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (Exception, SystemExit) as error:
        expected = "expected package.module:function, a config.json, a folder that has one, or the name of a model"
        raise PlanError(f"{what}: {expected}; transformers says: {_sentence(error)}") from error

    def make() -> nn.Module:
        with quiet():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        return model

    return make


def _sentence(error: BaseException) -> str:
    """What an error of transformers begins with: the rest is advice on its own functions."""
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__


@contextmanager
def importing_transformers(what: str) -> Iterator[None]:
    """Raise a PlanError, about `what` needs it, if transformers is missing or does not import in the block."""
    try:
        with quiet():
            yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise PlanError(f"{what} needs the package transformers: pip install transformers") from error
        raise PlanError(f"{what}: transformers is installed, and does not import: {describe(error)}") from error
