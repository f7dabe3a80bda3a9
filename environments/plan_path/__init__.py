"""Plan-Path: walk through a grid with walls to a goal."""

from verl_atgrpo.environments.plan_path.environment import PlanPath, SinglePlanPath

__all__ = ["PlanPath", "SinglePlanPath"]
