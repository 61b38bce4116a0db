"""vLLM with this package's plug-in as a peer: the same engine as vLLM's peer, and drafts.

The Python of vLLM's environment runs it, where this package is installed, or is found by
PYTHONPATH with its entry points.
"""

import importlib
import json
import os
import sys
from importlib.metadata import entry_points
from typing import Any

# The script beside this one: what plain vLLM is measured by.
vllm_peer: Any = importlib.import_module("vllm_peer")


def main() -> None:
    """Arguments: checkpoint, dtype, longest sequence, largest batch, masks, adapter if any."""
    if "mars" not in entry_points(group="vllm.general_plugins").names:
        sys.exit(
            f"{sys.executable} has no mars-ray: install it there without its dependencies, or name "
            "its directory in PYTHONPATH (docs/vllm.md)"
        )
    # The plain peer has the runner that vLLM chooses; the plug-in works with this one.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    replies = vllm_peer.own_stdout()
    adapter = next(iter(sys.argv[6:]), None)
    llm = vllm_peer.load(
        *sys.argv[1:4],
        speculative_config={
            "method": "custom_class",
            "model": "mars_ray.vllm.proposer.MarsProposer",
            "num_speculative_tokens": 2 * int(sys.argv[5]),
        },
        additional_config={"mars": {"adapter": adapter}},
    )
    vllm_peer.say(replies, {"peer": "vllm-mars", "version": vllm_peer.version()})
    for line in sys.stdin:
        vllm_peer.say(replies, _answer(llm, json.loads(line)))


def _answer(llm: Any, task: dict[str, Any]) -> dict[str, Any]:
    before = _counts(llm)
    reply = vllm_peer.answer(llm, task)
    after = _counts(llm)
    return reply | {
        "forwards": after["total"]["forwards"] - before["total"]["forwards"],
        "steps": after["steps"] - before["steps"],
    }


def _counts(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("mars_counts")[0]


if __name__ == "__main__":
    main()
