"""Many processes: the same script on one process, on N of one machine, and on a cluster."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import clusters, xla_bridge
from jax._src import distributed as runtime

LOST_EXIT_CODE = 75
"""The exit code of a process that ended because another one was lost."""
