"""Run the command line as `python -m expstore`."""

from expstore.cli.app import main

main()
