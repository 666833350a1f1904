"""Check the scripts of the page: their unit tests, types and format (part of `make lint`).

    python -m tests.support.page_scripts            check
    python -m tests.support.page_scripts --format   write the format

Checks that need Node, or packages of npm that cannot be downloaded, are skipped with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

STATIC = ROOT / "api" / "static"
#: Unit tests of the modules that need no browser.
TESTS = ROOT / "tests" / "page" / "scripts"
#: The packages and their versions.
PACKAGES = (ROOT / "api" / "package.json", ROOT / "api" / "package-lock.json")
#: Where npm installs the packages.
INSTALLED = ROOT / "build" / "node"
#: The first version of Node that has what the scripts use.
OLDEST_NODE = 20
#: Codes of npm's errors without a network.
NO_NETWORK = re.compile(
    r"\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT)\b"
)


class MissingTool(Exception):
    """A tool is missing; the message names the checks that are skipped, and why."""


def formatted_files() -> list[Path]:
    """Return the files that prettier formats."""
    scripts = [
        path for path in STATIC.rglob("*") if path.suffix in (".js", ".css") and "vendor" not in path.parts
    ]
    return sorted([*scripts, *TESTS.glob("*.mjs")])


def run(*command: object) -> int:
    """Run a program in the checkout, print its output if it fails, and return its exit code."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        print(done.stdout, end="", flush=True)
    return done.returncode


def find_node() -> str:
    """Return the path of Node.

    Raises:
        MissingTool: It is not installed, or it is too old.
    """
    node = shutil.which("node")
    if node is None:
        raise MissingTool("the scripts of the page are not checked: Node is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise MissingTool(
            f"the scripts of the page are not checked: Node is {version}, not {OLDEST_NODE} or later"
        )
    return node


def install_packages() -> Path:
    """Install TypeScript and prettier unless they are installed; return the folder of their programs.

    Raises:
        MissingTool: npm is not installed, or it has no network.
        SystemExit: npm failed for another reason.
    """
    what = "types and format of the page's scripts are not checked"
    stamp, lock = INSTALLED / "installed", PACKAGES[1].read_text()
    programs = INSTALLED / "node_modules" / ".bin"
    if stamp.exists() and stamp.read_text() == lock:
        return programs
    npm = shutil.which("npm")
    if npm is None:
        raise MissingTool(f"{what}: npm is not installed")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for path in PACKAGES:
        shutil.copy(path, INSTALLED)
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=30000"]
    done = subprocess.run(
        [npm, "ci", *options], cwd=INSTALLED, capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode and NO_NETWORK.search(done.stderr):
        raise MissingTool(f"{what}: npm cannot download TypeScript and prettier without a network")
    if done.returncode:
        raise SystemExit(f"npm failed in {INSTALLED}:\n{done.stderr}")
    stamp.write_text(lock)
    return programs


def check() -> int:
    """Run all checks that can run; return the number of those that failed."""
    node = find_node()
    tests = sorted(TESTS.glob("*.test.mjs"))
    failures = [run(node, "--import", TESTS / "globals.mjs", "--test", "--test-reporter", "spec", *tests)]
    try:
        programs = install_packages()
    except MissingTool as missing:
        print(f"skipped: {missing}")
    else:
        failures.append(run(programs / "tsc", "--project", PACKAGES[0].parent / "tsconfig.json"))
        failures.append(run(programs / "prettier", "--check", "--config", PACKAGES[0], *formatted_files()))
    return sum(map(bool, failures))


def write_format() -> int:
    """Write the format; return 1 if that failed."""
    find_node()
    programs = install_packages()
    return int(bool(run(programs / "prettier", "--write", "--config", PACKAGES[0], *formatted_files())))


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 if no check failed."""
    parser = argparse.ArgumentParser(description="Check the scripts of the page.")
    parser.add_argument("--format", action="store_true", help="write the format instead of checking it")
    options = parser.parse_args(arguments)
    try:
        return min(1, write_format() if options.format else check())
    except MissingTool as missing:
        print(f"skipped: {missing}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
