"""Rollouts as readable text."""

from __future__ import annotations

from mgrpo_jax.trajectory import Rollout, Trajectory


def rollout_text(rollout: Rollout) -> str:
  """A rollout as an indented tree: what each agent wrote and saw, statuses and rewards."""
  q = rollout.query
  head = f"# {q.question}  (query {q.id}, rollout {rollout.index}, level {q.level})"
  verdict = f"answer {rollout.main.result!r} is {'right' if rollout.correct else 'wrong'}; reference {q.answer!r}"
  subs = {s.invocation: s for s in rollout.subs}
  return "\n".join([head, verdict, *_trajectory_lines(rollout.main, subs, "")])


def _trajectory_lines(t: Trajectory, subs: dict[int, Trajectory], indent: str) -> list[str]:
  reward = "" if t.reward is None else f", reward {t.reward:.2f}"
  terms = "".join(f" {k}={v:g}" for k, v in t.components.items()) + ("" if t.share is None else f", share {t.share:g}")
  lines = [f"{indent}{t.agent}: {t.task!r} -> {t.result!r} [{t.status}, format {'ok' if t.format_ok else 'broken'}{reward}{terms}]"]
  for event in t.events:
    if "error" in event:
      lines.append(f"{indent}  ! {event['error']}")
      continue
    lines.append(f"{indent}  > {event['text']}")
    if event.get("invocation") in subs:
      lines += _trajectory_lines(subs[event["invocation"]], subs, indent + "    ")
    if "observation" in event:
      lines.append(f"{indent}  < " + event["observation"].replace("\n", f"\n{indent}    "))
  return lines
