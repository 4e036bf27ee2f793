"""A headless Chromium for tests: the one of the system, or installed from Debian's packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL_SECONDS = 240


def find_chromium() -> tuple[str | None, str]:
    """(its path, or None; why not). As root, tries to install it once a session."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is not None:
        return found, ""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return None, "no Chromium, and no right to install it with apt-get"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    options = ("-y", "-qq", "--no-install-recommends")
    for command in (("update", "-qq"), ("install", *options, "chromium")):
        try:
            done = subprocess.run(
                ("apt-get", *command),
                env=environment,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"apt-get {command[0]} took longer than {INSTALL_SECONDS} s"
        if done.returncode:
            return None, f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}"
    found = shutil.which(NAMES[0])
    return found, "" if found else "apt-get installed no chromium"


def run_chromium(chromium: str, page: Path, folder: Path, *options: str) -> str:
    """Open `page` and return what is printed; `folder` holds the profile. Nothing is resolved."""
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--disable-background-networking", "--no-first-run", "--hide-scrollbars",
        *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def measure(
    chromium: str, page: str, folder: Path, script: str, size: tuple[int, int], *options: str
) -> Any:
    """What `script` returns, run in a frame of `size` once the HTML `page` in it is laid out.

    A window would be at least 500 pixels wide. The copy in the frame allows all inline scripts.
    """
    opened, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert count == 1, count
    run = (
        "<script>setTimeout(() => { let found;"
        f"try {{ found = (() => {{{script}}})() }} catch (error) {{ found = error.stack }}"
        "parent.document.getElementById('measured').textContent = JSON.stringify(found);"
        "}, 100)</script></body>"
    )
    framed = escape(opened.replace("</body>", run))
    width, height = size
    outer = folder / "measured.html"
    outer.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><pre id="measured"></pre>'
        f'<iframe width="{width}" height="{height}" style="border:0" srcdoc="{framed}"></iframe>',
        encoding="utf-8",
    )
    wanted = ("--window-size=1400,1000", "--virtual-time-budget=1000", "--dump-dom")
    printed = run_chromium(chromium, outer, folder, *wanted, *options)
    (found,) = re.findall(r'<pre id="measured">(.*?)</pre>', printed, flags=re.DOTALL)
    return json.loads(unescape(found))
