"""Python runs this at its start: a replica's process waits, as one of a large model would."""

import os
import time

time.sleep(float(os.environ.get("SLOW_START_S", "0")))
