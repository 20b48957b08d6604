"""attnfold as the attention of vLLM on CPUs.

    VLLM_PLUGINS=attnfold vllm serve ..

vLLM calls `plugin` in each of its processes (entry point group `vllm.general_plugins`).  It does nothing unless
VLLM_PLUGINS names it: who installs both packages does not change backends by that.

    ATTNFOLD_VLLM_RECORD=FOLDER            writes each attention call to FOLDER, as files for `attnfold verify`
    ATTNFOLD_VLLM_RECORD_CALL=LAYER,STEP   only this one; both count from 0

Served are decoder layers of any group and window, ALiBi, soft-cap and sink logits, with caches of 16 and 32 bits;
anything else is a NotImplementedError that names the argument.  Models with MLA never reach this: vLLM gives them a
backend of their own.
"""

from __future__ import annotations

import os


def register() -> None:
    """Puts attnfold in the place of vLLM's CPU backend, in this process; before its first engine, as vLLM looks once.

    Raises:
        ModuleNotFoundError: vllm is not installed.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "attnfold.integrations.vllm._backend.Backend")


def plugin() -> None:
    """What vLLM calls: registers if VLLM_PLUGINS names attnfold."""
    if "attnfold" in os.environ.get("VLLM_PLUGINS", "").split(","):
        register()
