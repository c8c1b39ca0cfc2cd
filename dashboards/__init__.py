"""What people choose from: pages made of results, in one file that needs nothing else."""
