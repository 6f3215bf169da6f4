"""`python -m queue_core` is the command `queue-core`."""

from queue_core.cli import main

raise SystemExit(main())
