"""Results that leave a store or come from elsewhere: records, comparisons, bundles, the site."""
