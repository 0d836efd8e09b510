"""The live console: `/`, a page of static files that reads `/debug/console` and `/debug/requests` and draws the fleet,
its latencies and its requests.

Rates and percentiles are differences between two answers, and the page computes them: the router keeps no history for
it, and does nothing while no page is open. May import what `router.http` may.
"""
