"""Run the command line as `python -m expstore`."""

from expstore.cli import main

main()
