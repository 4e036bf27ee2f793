"""Model families: a file for each maps a `config.json` onto layers; `registry.py` lists them."""
