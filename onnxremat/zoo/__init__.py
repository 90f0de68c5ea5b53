"""Many models compiled for many budgets: jobs in processes of their own, on this machine or on a dask cluster, with a folder of results."""
