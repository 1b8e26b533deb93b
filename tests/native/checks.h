/* What the parts of the test of the C library share. */

#ifndef FT_CHECKS_H
#define FT_CHECKS_H

#include "foretell_native.h"
#include "simd.h"

#define COUNT(ARRAY) ((int32_t)(sizeof(ARRAY) / sizeof *(ARRAY)))
#define MOST_THREADS_HERE 3

extern const char *const kinds[5]; /* of kernels, the portable ones last */
#define FORMS 20
#define FORMS_OF_MODELS 4          /* the first ones, of which models are made */

/* Matrices as the library reads them. */
typedef struct {
    const char *name;
    int32_t format, bits, group, offset, scaling, least_scaling;
    const int8_t *table;
} matrix_form;

extern const matrix_form forms[FORMS];
extern uint32_t seed;

/* Says what is wrong and ends the program. */
void fail(const char *what, const char *where);
void *room(size_t bytes);
void choose(const char *kind);
float random_float(void); /* from -1 to 1 */
float *random_floats(int64_t count, float size);
/* Whose bits these kernels have: the portable ones', but for sums of bfloat16 by avx512_bf16. */
const char *twin_of(const char *kind, int form);
/* A matrix of random bits, in memory of just its size. `form`: index of `forms`. */
ft_matrix make_matrix(int form, int32_t outputs, int32_t inputs, int biased);
void drop_matrix(ft_matrix *matrix);

void check_forwards(void);

#endif
