"""`kvrelay demo`: starts a cluster of its own, asks it a handful of things, shows what each cost, stops it again."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.cluster import write_config
from kvrelay.cli.console import Progress, out, print_wide, write_text
from kvrelay.cli.demo_prompts import FIRST_ANSWER_PROMPTS, DemoPrompt, concurrent_pair, long_prompt, sampled_prompt
from kvrelay.cli.options import DEFAULT_CONFIG, ConfigOption, LauncherOption
from kvrelay.cli.render import SummaryRow, stats_lines, status_view, summary_table
from kvrelay.cli.signals import sigterm_interrupts, uninterrupted
from kvrelay.client import AsyncClient, Client, Generation, Token

_LINE_CHARS = 72
