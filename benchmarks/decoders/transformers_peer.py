"""transformers as a peer: `generate` on a padded batch, whose rows wait for the longest.

As `transformers-lookup` its drafts are found in the text so far, for one sequence at a time.
"""

import json
import sys

import transformers

from mars_ray.evaluate.bench import load_transformers, transformers_answer

_DRAFTS = 4


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    model = load_transformers(settings["checkpoint"], settings["dtype"])
    is_lookup = settings["peer"] == "transformers-lookup"
    drafts = {"prompt_lookup_num_tokens": _DRAFTS} if is_lookup else {}
    hello = {"peer": settings["peer"], "version": transformers.__version__}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        print(json.dumps(transformers_answer(model, json.loads(line) | drafts)), flush=True)


if __name__ == "__main__":
    main()
