"""The syntax of options that name a drafter or its settings in one text.

`speculative_text.py` reads these texts. Nothing here imports torch, so that `--help` comes at once.
"""

from __future__ import annotations

GRAMMAR = (
    "off, auto, mtp[:K[:eagle|vanilla|target]], ngram[:K[:MAX_N]], suffix[:K], jump[:K], "
    "model:PATH[:K], eagle3:PATH[:K], dflash:PATH[:K], mtp:tree:NODES:TOP_K:DEPTH, "
    "eagle3:PATH:tree:NODES:TOP_K:DEPTH or save-hidden:FOLDER"
)
RELAXED_GRAMMAR = (
    "BEGIN:END[:TOPK[:DELTA]], the token ids (with commas) that begin and end a thinking phase, "
    "how many of the most probable tokens count, and how much less probable they may be"
)
VOCABULARY_GRAMMAR = "TEXT:SIZE, a UTF-8 file and how many of its most frequent tokens to keep"
