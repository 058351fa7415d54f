# Reference numbers of R's `lm`, `glm` and the `sandwich` package, as JSON with 17 significant digits.
# Usage: Rscript make_reference.R INPUT_DIR OUTPUT_DIR   (INPUT_DIR is what make_inputs.py wrote)

library(sandwich)

arguments <- commandArgs(trailingOnly = TRUE)
if (length(arguments) != 2) stop("usage: Rscript make_reference.R INPUT_DIR OUTPUT_DIR")
input <- arguments[1]
output <- arguments[2]

# A minimal JSON writer: every number with %.17g, so that reading it back gives the same double.
number <- function(value) {
  if (!all(is.finite(value))) stop("a reference number is not finite")
  sprintf("%.17g", value)
}
vector_json <- function(values) paste0("[", paste(number(values), collapse = ","), "]")
matrix_json <- function(values) {
  rows <- vapply(seq_len(nrow(values)), function(r) vector_json(values[r, ]), "")
  paste0("[", paste(rows, collapse = ",\n"), "]")
}
object_json <- function(members) {
  paste0("{", paste0("\"", names(members), "\": ", unlist(members), collapse = ",\n"), "}\n")
}

read_part <- function(name, part) as.matrix(read.csv(file.path(input, paste0(name, "_", part, ".csv"))))

# vcov of a matrix response is ordered output by output: all coefficients of y1, then of y2, ...
# Prediction covariance at test row x: (I_k (x) x)' V (I_k (x) x), flattened row by row to k * k numbers.
prediction_covariance <- function(vcov_matrix, test_design, outputs) {
  rows <- lapply(seq_len(nrow(test_design)), function(r) {
    spread <- kronecker(diag(outputs), matrix(test_design[r, ], ncol = 1))
    as.vector(t(t(spread) %*% vcov_matrix %*% spread))
  })
  do.call(rbind, rows)
}

sandwich_members <- function(fit, types, test_design, outputs) {
  members <- list()
  for (type in types) {
    # For a matrix response "const" is vcov() itself; asking vcovHC for it says so with a warning.
    vcov_matrix <- if (type == "const" && outputs > 1) vcov(fit) else vcovHC(fit, type = type)
    members[[paste0("vcov_", type)]] <- matrix_json(vcov_matrix)
    members[[paste0("prediction_", type)]] <- matrix_json(prediction_covariance(vcov_matrix, test_design, outputs))
  }
  members
}

versions <- paste0("\"", R.version.string, ", sandwich ", packageVersion("sandwich"), "\"")

linear <- function(name) {
  train <- read_part(name, "train")
  is_target <- startsWith(colnames(train), "y")
  targets <- train[, is_target, drop = FALSE]
  features <- train[, !is_target, drop = FALSE]
  test_design <- cbind(1, read_part(name, "test"))
  outputs <- ncol(targets)
  fit <- if (outputs == 1) lm(targets[, 1] ~ features) else lm(targets ~ features)
  members <- c(
    list(
      made_with = versions,
      coefficients = matrix_json(as.matrix(coef(fit))),
      hat_values = vector_json(hat(features, intercept = TRUE)),
      residuals = matrix_json(as.matrix(residuals(fit)))
    ),
    sandwich_members(fit, c("const", "HC0", "HC1", "HC2", "HC3"), test_design, outputs)
  )
  cat(object_json(members), file = file.path(output, paste0(name, ".json")))
}

binary <- function(name) {
  train <- read_part(name, "train")
  features <- train[, startsWith(colnames(train), "x"), drop = FALSE]
  test_design <- cbind(1, read_part(name, "test"))
  control <- glm.control(epsilon = 1e-15, maxit = 100)
  fit <- glm(train[, "y1"] ~ features, family = binomial(), control = control)
  # Scoring to a fixed point: hat values and vcov then belong to the coefficients printed beside them.
  fit <- glm(train[, "y1"] ~ features, family = binomial(), control = control, start = coef(fit))
  model_based <- vcov(fit)
  members <- c(
    list(
      made_with = versions,
      coefficients = matrix_json(as.matrix(coef(fit))),
      hat_values = vector_json(hatvalues(fit)),
      fitted = vector_json(fitted(fit)),
      vcov_model = matrix_json(model_based),
      prediction_model = matrix_json(prediction_covariance(model_based, test_design, 1))
    ),
    sandwich_members(fit, c("HC0", "HC3"), test_design, 1)
  )
  cat(object_json(members), file = file.path(output, paste0(name, ".json")))
}

for (name in c("diabetes", "linnerud", "wine", "breast_cancer")) linear(name)
binary("malignancy")
