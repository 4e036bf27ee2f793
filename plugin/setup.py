"""Build without the engine: the package `graphengine` itself has only its `__init__.py` here."""

from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py


class WithoutTheEngine(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[Any]:
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package != "graphengine" or each[1] == "__init__"]


setup(cmdclass={"build_py": WithoutTheEngine})
