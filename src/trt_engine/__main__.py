"""`python -m trt_engine`: the command line."""

from trt_engine.cli.main import main

main()
