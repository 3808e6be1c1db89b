-- The columns of FOCUS, the FinOps Open Cost and Usage Specification 1.2: all that it calls mandatory, and those of the
-- others that calls have something for. Those that begin with `x_` are ours, as it lays down.
--
-- By the moment that a call is charged at, as in `spend_per_hour`; by quarters of an hour, as the offsets of all time
-- zones are whole numbers of those: so the rows add up to days and months anywhere.
SELECT
    toStartOfFifteenMinutes(ifNull(reserved_at, started_at)) AS ChargePeriodStart,
    provider AS ProviderName,
    agent AS ResourceId,
    tenant AS SubAccountId,
    model AS SkuId,
    submitted_by AS x_SubmittedBy,
    user AS x_User,
    team AS x_Team,
    deployment AS x_Deployment,
    provider_key AS x_ProviderKey,
    cost_tags AS Tags,
    ChargePeriodStart + INTERVAL 15 MINUTE AS ChargePeriodEnd,
    toDateTime(toStartOfMonth(ChargePeriodStart), 'UTC') AS BillingPeriodStart,
    BillingPeriodStart + INTERVAL 1 MONTH AS BillingPeriodEnd,
    sum(attempts.cost) AS BilledCost,
    BilledCost AS EffectiveCost,
    BilledCost AS ListCost,
    BilledCost AS ContractedCost,
    'USD' AS BillingCurrency,
    ProviderName AS BillingAccountId,
    ProviderName AS BillingAccountName,
    SubAccountId AS SubAccountName,
    ProviderName AS PublisherName,
    ProviderName AS InvoiceIssuerName,
    'AI and Machine Learning' AS ServiceCategory,
    'Generative AI' AS ServiceSubcategory,
    'LLM inference' AS ServiceName,
    ResourceId AS ResourceName,
    'Agent' AS ResourceType,
    'Usage' AS ChargeCategory,
    CAST(NULL, 'Nullable(String)') AS ChargeClass,
    concat('Calls of ', SkuId, ' by agent ', ResourceId) AS ChargeDescription,
    'Usage-Based' AS ChargeFrequency,
    'Standard' AS PricingCategory,
    if(x_InputTokens IS NULL AND x_OutputTokens IS NULL, NULL, ifNull(x_InputTokens, 0) + ifNull(x_OutputTokens, 0))
        AS ConsumedQuantity,
    'Tokens' AS ConsumedUnit,
    ConsumedQuantity AS PricingQuantity,
    ConsumedUnit AS PricingUnit,
    sum(attempts.input_tokens) AS x_InputTokens,
    sum(attempts.output_tokens) AS x_OutputTokens,
    sum(attempts.cached_tokens) AS x_CachedTokens,
    count() AS x_Calls,
    countIf(outcome != 'success') AS x_FailedCalls,
    if(x_FailedCalls = 0, toDecimal128(0, 9), sumIf(attempts.cost, outcome != 'success')) AS x_WastedCost,
    ifNull(sumIf(attempts.cost, cost_basis = 'estimated'), toDecimal128(0, 9)) AS x_EstimatedCost,
    countIf(attempts.cost IS NULL) AS x_CallsOfUnknownCost
FROM attempts FINAL
WHERE NOT short_circuited
GROUP BY ChargePeriodStart, ProviderName, ResourceId, SubAccountId, SkuId, x_SubmittedBy, x_User, x_Team,
    x_Deployment, x_ProviderKey, Tags
