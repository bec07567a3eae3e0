"""Chooses and books a plan: candidates, shares of tenants, forecasts, requests without a chance."""
