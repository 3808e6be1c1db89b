"""Ties the fork server to the process that started it; the server imports this module first, and nothing else does.

A service must not outlive its supervisor. The kernel kills the server when the thread that started it ends, and each
service when the server ends.
"""

import gc
import os

from breakwater.kernel.process import prctl

SERVER_PID = os.getpid()

os.setsid()  # a signal to the terminal's processes is for the supervisor, which stops the services in order
prctl.hide_memory()
prctl.end_with_parent()
gc.disable()  # collections would take a tenth of the time that importing takes; each service enables them
