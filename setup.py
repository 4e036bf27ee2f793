"""The description for an index is the README, in which links into the repository are plain text."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")

setup(long_description=LINK.sub(r"\1", README), long_description_content_type="text/markdown")
