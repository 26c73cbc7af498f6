"""Pages as diagnosis would make them: one of an ill job, one of a healthy one, one written by an enemy."""

from __future__ import annotations

import math
import random
from typing import Any

from penstock.report import (
    Arm,
    Chart,
    Fact,
    FigureTable,
    Finding,
    Gain,
    Headline,
    Lane,
    Line,
    Page,
    SlowSample,
    Span,
    StepTimes,
)

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;\x1b[31m"


def ill_page(num_steps: int = 64, **changes: Any) -> Page:
    """Every 16th batch is slow, two workers, a prefetch that is too small; everything is on it."""
    draw = random.Random(5)
    now, waits, steps = 0.0, [], []
    trainer, workers, feed = [], ([], []), []
    for number in range(num_steps):
        slow = number % 16 == 0
        wait, step = (0.2 if slow else draw.uniform(0, 0.004)), draw.uniform(0.018, 0.026)
        trainer += [Span(start=now, duration=wait, kind="wait", step=number)]
        trainer += [Span(start=now + wait, duration=step, kind="step", step=number)]
        spans = workers[number % 2]
        made = 0.195 if slow else 0.006
        begin = max(now + wait - made - 0.004, spans[-1].start + spans[-1].duration if spans else 0.0)
        spans.append(Span(start=begin, duration=made, kind="sample", label=f"batch {number}", step=number))
        spans.append(Span(start=begin + made, duration=0.002, kind="collate", step=number))
        feed.append(Span(start=now + wait - 0.0015, duration=0.001, kind="handover", step=number))
        waits.append(wait), steps.append(step)
        now += wait + step
    times = tuple(now * place / 80 for place in range(81))
    wave = [0.3 * math.sin(place / 6) + 0.05 * draw.random() for place in range(81)]
    lanes = [Lane(name="training", spans=tuple(trainer))]
    lanes += [Lane(name=f"worker {place}", spans=tuple(spans)) for place, spans in enumerate(workers)]
    lanes += [Lane(name="hand-over", spans=tuple(feed))]
    page: dict[str, Any] = {
        "title": "penstock doctor · train.py",
        "verdict": "Your training waits for data 43 % of the time. One setting fixes most of it: prefetch_factor=24 "
        "makes it 1.46 × faster, measured on your job.",
        "tone": "bad",
        "headlines": (
            Headline(value="28.4/s", label="steps now"),
            Headline(value="43 %", label="of the time spent waiting", tone="bad"),
            Headline(value="1.75 ×", label="the most a better loader can give"),
            Headline(value="0.12 + 1.88", label="cores used here + by other programs"),
        ),
        "findings": (
            Finding(
                id="prefetch",
                title="Prefetch is too small for how uneven the batches are",
                evidence=(
                    "15 of 16 batches take 4 ms, every 16th takes 208 ms (samples 0, 128, 256, … wait 200 ms without "
                    "using the processor).",
                    "The worker is 5 batches ahead on average; 10 steps of head start are needed to ride over one "
                    "such batch.",
                ),
                change="DataLoader(..., prefetch_factor=24)",
                where="train.py:24",
                price="+0.2 MB of memory",
                gain=Gain(ratio=1.46, error=0.09),
                steps=tuple((number, number + 1) for number in range(0, num_steps, 16)),
            ),
            Finding(
                id="workers",
                title="One worker more helps a little",
                evidence=("Each worker is busy 71 % of the time.",),
                change="DataLoader(..., num_workers=3)",
                where="train.py:24",
                price="+310 MB of memory",
                gain=Gain(ratio=1.06, error=0.06),
                steps=((20, 30),),
            ),
            Finding(
                id="prepare",
                title="The transform decodes the same images in every epoch",
                evidence=("84 % of a sample's time is in `decode`.",),
                change="penstock prepare images data/images",
                limit=Gain(ratio=1.75, error=0.11),
                link="https://example.org/preparation",
            ),
            Finding(
                id="neighbours",
                title="Other programs use 1.7 of the 2 cores",
                evidence=("The training thread was ready to run but had no core for 3.1 ms of every step.",),
                change="ask for cores of your own: #SBATCH --cpus-per-task=2 --exclusive",
            ),
        ),
        "lanes": tuple(lanes),
        "steps": StepTimes(wait=tuple(waits), step=tuple(steps)),
        "charts": (
            Chart(title="Throughput", unit="steps/s", times=times,
                  lines=(Line(name="steps", values=tuple(28 + 20 * each for each in wave)),)),
            Chart(title="Processors", unit="cores", times=times, note="This machine has 2 cores.",
                  lines=(Line(name="this job", values=tuple(0.5 + each for each in wave)),
                         Line(name="other programs", values=tuple(1.3 - each for each in wave)),
                         Line(name="training process", values=tuple(0.2 + each / 3 for each in wave)))),
            Chart(title="Memory", unit="GB", times=times,
                  lines=(Line(name="resident", values=tuple(1.2 + place / 200 for place in range(81))),
                         Line(name="shared once", values=tuple(math.nan if each % 20 else 0.9 for each in range(81))))),
        ),
        "arms": (
            Arm(name="loader that costs nothing", gain=Gain(ratio=1.75, error=0.11), steps_per_second=49.5,
                wait_seconds=0.0, step_seconds=0.0202, cores=0.01),
            Arm(name="prefetch_factor=24", gain=Gain(ratio=1.46, error=0.09), steps_per_second=41.2,
                wait_seconds=0.0031, step_seconds=0.0212, cores=0.11, is_advised=True),
            Arm(name="num_workers=3", gain=Gain(ratio=1.06, error=0.06), steps_per_second=30.2,
                wait_seconds=0.0119, step_seconds=0.0213, cores=0.12),
            Arm(name="as it is", gain=Gain(ratio=1.0), steps_per_second=28.4, wait_seconds=0.0142,
                step_seconds=0.0211, cores=0.12, is_baseline=True),
            Arm(name="in_order=False", gain=Gain(ratio=0.88, error=0.14), steps_per_second=25.0,
                wait_seconds=0.018, step_seconds=0.0220, cores=0.12),
        ),
        "tables": (
            FigureTable(title="Ways to run it", header=("", "batches/s", "memory"),
                        rows=(("loader alone", "1,636", "544 MB"), ("with a step of 10 ms", "96.5", "501 MB"))),
        ),
        "slowest": tuple(
            SlowSample(index=str(place * 128), seconds=0.2 - place / 100, cpu_seconds=0.002, step=place * 16,
                       worker=f"worker {place % 2}")
            for place in range(4)
        ),
        "machine": (
            Fact(name="processor", value="Intel Xeon, 2 of 2 cores"),
            Fact(name="memory", value="25.3 GB"),
            Fact(name="accelerator", value="none"),
            Fact(name="python", value="3.11.7, torch 2.13.0"),
        ),
        "notes": ("Intervals are 95 %. Two that overlap are within the noise of this machine.",),
    }  # fmt: skip
    return Page(**page | changes)


def healthy_page() -> Page:
    """Nothing to change."""
    return ill_page(
        title="penstock doctor · healthy.py",
        verdict="Not waiting for data: a perfect loader would make it 1.01 ± 0.03 × faster, which is nothing.",
        tone="good",
        findings=(),
        arms=(),
        slowest=(),
    )


def hostile_page() -> Page:
    """Every text is an attack."""
    return Page(
        title=HOSTILE,
        verdict=HOSTILE,
        headlines=(Headline(value=HOSTILE, label=HOSTILE),),
        findings=(
            Finding(id=HOSTILE, title=HOSTILE, evidence=(HOSTILE,), change=HOSTILE, where=HOSTILE, price=HOSTILE,
                    link=f"javascript:{HOSTILE}", steps=((0, 1),)),
        ),
        lanes=(Lane(name=HOSTILE, spans=(Span(start=0.0, duration=1.0, kind="step", label=HOSTILE, step=0),)),),
        steps=StepTimes(wait=(0.5,), step=(0.5,)),
        charts=(Chart(title=HOSTILE, unit=HOSTILE, times=(0.0, 1.0), note=HOSTILE,
                      lines=(Line(name=HOSTILE, values=(0.0, 1.0)),)),),
        arms=(Arm(name=HOSTILE, gain=Gain(ratio=1.0), steps_per_second=1.0, wait_seconds=0.5, step_seconds=0.5,
                  note=HOSTILE),),
        tables=(FigureTable(title=HOSTILE, header=(HOSTILE, "a:b"), rows=((HOSTILE, HOSTILE),)),),
        slowest=(SlowSample(index=HOSTILE, seconds=1.0, worker=HOSTILE, step=0),),
        machine=(Fact(name=HOSTILE, value=HOSTILE),),
        notes=(HOSTILE,),
    )  # fmt: skip
