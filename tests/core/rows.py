"""Small batches for the core's tests: `p` prompt, `r` response, digits are conversation indices."""

import torch

from mars_ray.core.layout import TokenBatch

MASK = 99


def batch_of(*rows: str, first_token: int = 10) -> TokenBatch:
    """Each row is packed conversations, such as "pprr pprpr"; padded to equal length."""
    width = max(len(row.replace(" ", "")) for row in rows)
    ids, documents, positions, responses = [], [], [], []
    document = 0
    for row in rows:
        row_documents, row_positions, row_responses = [], [], []
        for conversation in row.split():
            row_documents += [document] * len(conversation)
            row_positions += list(range(len(conversation)))
            row_responses += [kind == "r" for kind in conversation]
            document += 1
        pad = width - len(row_documents)
        ids.append([first_token + i for i in range(len(row_documents))] + [0] * pad)
        documents.append(row_documents + [-1] * pad)
        positions.append(row_positions + [0] * pad)
        responses.append(row_responses + [False] * pad)
    return TokenBatch(
        input_ids_BL=torch.tensor(ids),
        document_BL=torch.tensor(documents),
        position_BL=torch.tensor(positions),
        response_BL=torch.tensor(responses),
    )
