"""Grammars as finite automata over token ids, for the device to follow.

    patterns       a grammar as a tree of characters, sequences, choices and repetitions
    regex_syntax   patterns of regular expressions
    json_patterns  patterns of JSON schemas
    byte_automaton the deterministic automaton of a pattern, over the bytes of UTF-8
    vocabulary     the texts of a tokenizer's tokens, as a tree
    token_automaton  the tables of a grammar for a vocabulary
    forced_text    the tokens of text where only one text can follow
    compiling      all of this for one request's grammar, compared with llguidance's masks

A grammar that has no such automaton within the limits is an `Unsupported`, with the reason: its
request keeps the masks that the host makes.
"""

from __future__ import annotations
