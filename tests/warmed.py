"""What a process makes when it first needs it, and then has: imported before others are forked from this one."""

from importlib.resources import files

import typer.main
from once import make_once
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rlhf.pipeline import report
from rlhf.pipeline.commands import app
from rlhf.pipeline.report import drawing, page

make_once()
typer.main.get_command(app)
get_checkpoint_conversion_mapping("llama")
drawing.draw_lines([[(1, 0.0), (2, 1.0)]], None, "")
for template in files(report).joinpath("templates").iterdir():
    if template.name.endswith(".jinja"):
        page.environment().get_template(template.name)
