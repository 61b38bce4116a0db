"""The paper's decoding as published: a padded batch commits confident tokens in lockstep.

The ablation is what the cache keeps between forwards: `none` forwards everything again; `token`
keeps what all rows have committed; `block` keeps whole blocks, at whose ends rows wait for each
other (the paper's block-level cache). Finished rows are computed until the last one is done.

Shape suffixes: B rows of the batch, Q columns of a forward, C columns so far, P rows' results.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from mars_ray.model.directory import ModelCard, read_card
from mars_ray.model.load import load_model


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    model = load_model(settings["checkpoint"], dtype=getattr(torch, settings["dtype"]))
    card = read_card(settings["checkpoint"])
    print(json.dumps({"peer": "lockstep", "version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(_answer(model, card, task)), flush=True)


def _answer(model: PreTrainedModel, card: ModelCard, task: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    decoders = [Lockstep(model, card, task, prompts) for prompts in task["batches"]]
    for decoder in decoders:
        decoder.run()
    return {
        "seconds": time.perf_counter() - started,
        "tokens": [answer for decoder in decoders for answer in decoder.answers],
        "forwards": sum(decoder.forwards for decoder in decoders),
        "steps": sum(decoder.steps for decoder in decoders),
        "rows": sum(decoder.positions for decoder in decoders),
    }


class Lockstep:
    """One batch; columns are [padding | prompt | answer], and all prompts end in one column."""

    def __init__(
        self,
        model: PreTrainedModel,
        card: ModelCard,
        task: dict[str, Any],
        prompts: list[list[int]],
    ) -> None:
        self._model, self._card = model, card
        self._cache_kind: str = task["cache"]
        self._threshold: float = task["threshold"]
        self._most: int = task["max_new_tokens"]
        self._stops = set(task["stop_ids"])
        self._prompts = prompts
        self._prompt_end = max(map(len, self._prompts))
        self._pad_B1 = torch.tensor([[self._prompt_end - len(ids)] for ids in self._prompts])
        self.answers: list[list[int]] = [[] for _ in self._prompts]
        self._done = [False] * len(self._prompts)
        # Counts every row until it is done, waiting included.
        self.forwards = 0
        self._cache = DynamicCache()
        self.steps = self.positions = 0
        self._block_start = self._first = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Decode until every row has its answer."""
        while not all(self._done):
            self._step()

    def _step(self) -> None:
        start = self._first
        logits_BQV = self._forward(start)
        self._first = self._first_of_next()
        self.steps += 1
        self.positions += logits_BQV.shape[0] * logits_BQV.shape[1]
        logits_BQV[:, :, self._card.mask_token_id] = -torch.inf
        p_BQ, token_BQ = logits_BQV.softmax(dim=-1).max(dim=-1)
        for index, answer in enumerate(self.answers):
            if self._done[index]:
                continue
            self.forwards += 1
            row = self._prompt_end + len(answer) - 1 - start
            window = slice(row, row + 1 + self._card.block_size)
            self._commit(index, token_BQ[index, window].tolist(), p_BQ[index, window].tolist())
        lengths = self._open_lengths()
        if lengths and min(lengths) >= self._block_start + self._card.block_size:
            self._block_start += self._card.block_size

    def _open_lengths(self) -> list[int]:
        return [len(a) for a, done in zip(self.answers, self._done, strict=True) if not done]

    def _first_of_next(self) -> int:
        """First column of the next forward; columns before it held final tokens in the last one."""
        match self._cache_kind:
            case "none":
                return 0
            case "token":
                return self._prompt_end + min(self._open_lengths())
            case _:
                return self._prompt_end + self._block_start

    def _forward(self, start: int) -> Tensor:
        """Float32 logits of the columns from `start` to the last row's last mask."""
        window, end = self._card.block_size, self._prompt_end
        end += max(self._open_lengths()) + window
        mask = self._card.mask_token_id
        rows = []
        for ids, answer in zip(self._prompts, self.answers, strict=True):
            row = [mask] * (self._prompt_end - len(ids)) + ids + answer + [mask] * end
            rows.append(row[start:end])
        column_Q, column_C = torch.arange(start, end), torch.arange(end)
        sees_BQC = (column_C <= column_Q[:, None]) & (column_C >= self._pad_B1[:, :, None])
        # A row of padding sees itself, or its softmax would have nothing to divide by.
        sees_BQC |= column_C == column_Q[:, None]
        if self._cache_kind == "none":
            self._cache = DynamicCache()
        elif too_many := self._cache.get_seq_length() - start:
            self._cache.crop(-too_many)
        output: Any = self._model(
            input_ids=torch.tensor(rows),
            attention_mask=sees_BQC[:, None],
            position_ids=(column_Q - self._pad_B1).clamp_min(0),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits.float()

    def _commit(self, index: int, tokens: list[int], confidences: list[float]) -> None:
        """Commit the causal row's token, then those of masks up to the first below the threshold or
        to the block's end."""
        answer = self.answers[index]
        room = self._most - len(answer)
        if self._cache_kind == "block":
            room = min(room, self._block_start + self._card.block_size - len(answer))
        for number, (token, confidence) in enumerate(zip(tokens, confidences, strict=True)):
            if number >= room or (number and confidence < self._threshold):
                break
            answer.append(token)
            if token in self._stops or len(answer) == self._most:
                self._done[index] = True
                break


if __name__ == "__main__":
    main()
