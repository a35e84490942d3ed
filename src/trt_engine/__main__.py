"""`python -m trt_engine`: the command line."""

import sys

try:
    from trt_engine.cli.main import main

    main()
except KeyboardInterrupt:  # Ctrl-C while the modules above were still being read
    sys.stderr.write("error: interrupted\n")
    sys.exit(130)
